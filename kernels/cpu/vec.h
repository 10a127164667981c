// Sixteen lanes at a time, in the compilers' vector extension: one source for AVX-512, AVX2, SSE2 and NEON, which the
// compiler maps to as many registers as it takes. Only what it cannot find by itself is written with intrinsics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EVENTLM_INLINE inline __attribute__((always_inline))

namespace eventlm {

using bf16 = std::uint16_t;
constexpr int kLanes = 16;
constexpr std::size_t kLineBytes = 64;

typedef float f32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::int32_t i32x16 __attribute__((vector_size(64)));
typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
typedef std::int16_t i16x16 __attribute__((vector_size(32)));
typedef std::int8_t i8x16 __attribute__((vector_size(16)));
typedef std::uint8_t u8x16 __attribute__((vector_size(16)));

// As many lanes as a register has. Where it has fewer than sixteen, GCC takes many operations on longer vectors apart
// into single numbers, so inner loops are written in these.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float f32xn __attribute__((vector_size(4 * kNative)));
typedef std::uint32_t u32xn __attribute__((vector_size(4 * kNative)));
typedef std::int32_t i32xn __attribute__((vector_size(4 * kNative)));
typedef std::int16_t i16xn __attribute__((vector_size(4 * kNative)));
typedef std::int8_t i8xn __attribute__((vector_size(2 * kNative)));
typedef std::uint16_t u16xn __attribute__((vector_size(2 * kNative)));
// As many as a register has words.
typedef std::uint8_t u8xn __attribute__((vector_size(kNative)));
typedef std::int8_t s8xn __attribute__((vector_size(kNative)));
typedef std::int16_t s16xn __attribute__((vector_size(2 * kNative)));

template <class T>
EVENTLM_INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
EVENTLM_INLINE void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Begins on a cache line, so that no vector of 64 bytes lies on two.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* memory, std::size_t) { ::operator delete(memory, std::align_val_t{64}); }
  bool operator==(const LineAllocator&) const { return true; }
};
template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

// What `operation` makes of vectors, register by register. To and From: of sixteen numbers of 32 bits.
template <class To, class Operation, class... From>
EVENTLM_INLINE To natively(Operation&& operation, const From&... from) {
  To to;
  for (int lane = 0; lane < kLanes; lane += kNative) {
    const auto part = operation(load<f32xn>(reinterpret_cast<const float*>(&from) + lane)...);
    store(reinterpret_cast<float*>(&to) + lane, part);
  }
  return to;
}

// One word in all lanes. Of what follows the compiler must not make work on the word: a load to all lanes is one
// instruction, a copy from another register two. (AVX-512 loads as it multiplies.)
EVENTLM_INLINE u32xn in_all_lanes(std::uint32_t word) {
  u32xn words = u32xn{} + word;
#if defined(__SSE2__) && !defined(__AVX512F__)
  asm("" : "+x"(words));
#endif
  return words;
}

EVENTLM_INLINE f32x16 splat(float value) { return f32x16{} + value; }

EVENTLM_INLINE float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

EVENTLM_INLINE float float_of_bits(std::uint32_t bits) { return load<float>(&bits); }

// Of fp16.
EVENTLM_INLINE float half_to_float(std::uint16_t half) {
  const std::uint32_t size = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  // A float of these bits is 2^-112 of what is meant, a subnormal one too.
  const float value = size < 0x0f800000 ? float_of_bits(size) * 0x1p112f : float_of_bits(size | 0x7f800000);
  return float_of_bits(load<std::uint32_t>(&value) | sign);
}

// To nearest, ties to even.
inline std::uint16_t to_half(float value) {
  const std::uint32_t bits = load<std::uint32_t>(&value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (size > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
  const std::uint32_t normal = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  if (size >= 0x38800000) return static_cast<std::uint16_t>(sign | normal);
  // A unit in the last place of a half is that of the smallest halves.
  const float sum = float_of_bits(size) + 0.5f;
  return static_cast<std::uint16_t>(sign | (load<std::uint32_t>(&sum) - 0x3f000000));
}

EVENTLM_INLINE f32xn load_halves(const void* from) {
#if defined(__AVX512F__)
  return (f32xn)_mm512_cvtph_ps((__m256i)load<u16xn>(from));
#elif defined(__F16C__)
  return (f32xn)_mm256_cvtph_ps((__m128i)load<u16xn>(from));
#else
  const u32xn bits = __builtin_convertvector(load<u16xn>(from), u32xn), size = (bits & 0x7fff) << 13;
  const u32xn finite = (u32xn)((f32xn)size * 0x1p112f);
  return (f32xn)((size < 0x0f800000 ? finite : size | 0x7f800000) | (bits & 0x8000) << 16);
#endif
}

// Each lane has the value of the one whose number differs in the bit DISTANCE.
template <int DISTANCE>
EVENTLM_INLINE f32x16 exchange_lanes(f32x16 x) {
#if defined(__clang__)
  constexpr int D = DISTANCE;
  return __builtin_shufflevector(x, x, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D, 8 ^ D, 9 ^ D, 10 ^ D,
                                 11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
#else
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(x, lanes ^ DISTANCE);
#endif
}

// Round to nearest, ties to even; a NaN stays one.
EVENTLM_INLINE bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

EVENTLM_INLINE f32x16 load_bf16(const bf16* from) {
  f32x16 values;
  for (int lane = 0; lane < kLanes; lane += kNative) {
    store(reinterpret_cast<float*>(&values) + lane, __builtin_convertvector(load<u16xn>(from + lane), u32xn) << 16);
  }
  return values;
}

EVENTLM_INLINE u32x16 bf16_bits(f32x16 value) {
  return natively<u32x16>(
      [](f32xn part) {
        const u32xn bits = (u32xn)part;
        const u32xn rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return (part == part) ? rounded : (bits >> 16) | 0x40;
      },
      value);
}

EVENTLM_INLINE void store_bf16(bf16* to, f32x16 value) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &narrow, 32);
#else
  store(to, __builtin_convertvector(bf16_bits(value), u16x16));
#endif
}

// Pairs of bf16 as 32-bit lanes, the even one low.
EVENTLM_INLINE u32x16 bf16_pairs(f32x16 even, f32x16 odd) {
#if defined(__AVX512BF16__)
  const u32x16 places = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                         0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (u32x16)_mm512_permutexvar_epi16((__m512i)places, (__m512i)both);
#else
  return bf16_bits(even) | bf16_bits(odd) << 16;
#endif
}

// `sum + a.even * b.even + a.odd * b.odd`, where each 32-bit lane of a and b holds two bf16, the even one low.
EVENTLM_INLINE f32xn dot_pairs(f32xn sum, u32xn a, u32xn b) {
#if defined(__AVX512BF16__)
  return (f32xn)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  sum += (f32xn)(a << 16) * (f32xn)(b << 16);
  return sum + (f32xn)(a & 0xffff0000u) * (f32xn)(b & 0xffff0000u);
#endif
}

// The same of 16-bit integers; what overflows 32 bits is lost.
EVENTLM_INLINE i32xn dot_int16_pairs(i32xn sum, u32xn a, u32xn b) {
#if defined(__AVX512BW__)
  return sum + (i32xn)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (i32xn)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return sum + (i32xn)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const i32xn even = ((i32xn)(a << 16) >> 16) * ((i32xn)(b << 16) >> 16);
  return sum + even + ((i32xn)a >> 16) * ((i32xn)b >> 16);
#endif
}

// To the nearest integer, ties to even, on all processors alike.
EVENTLM_INLINE i32x16 to_int(f32x16 value) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)value);
#elif defined(__SSE2__)
  __m128 x[4];
  __m128i rounded[4];
  std::memcpy(x, &value, sizeof value);
  for (int quarter = 0; quarter < 4; quarter++) rounded[quarter] = _mm_cvtps_epi32(x[quarter]);
  return load<i32x16>(rounded);
#else
  i32x16 rounded;
  for (int lane = 0; lane < kLanes; lane++) rounded[lane] = static_cast<std::int32_t>(__builtin_lrintf(value[lane]));
  return rounded;
#endif
}

// Bytes as numbers of 32 bits. GCC takes a conversion in one step apart into single numbers.
EVENTLM_INLINE i32xn widened(u8xn bytes) {
#if defined(__AVX512F__)
  return (i32xn)_mm512_cvtepu8_epi32((__m128i)bytes);
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, u16xn), i32xn);
#endif
}
EVENTLM_INLINE i32xn widened(s8xn bytes) {
#if defined(__AVX512F__)
  return (i32xn)_mm512_cvtepi8_epi32((__m128i)bytes);
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, s16xn), i32xn);
#endif
}

EVENTLM_INLINE f32xn to_floats(f32xn value) { return value; }
EVENTLM_INLINE f32xn to_floats(i32xn value) { return __builtin_convertvector(value, f32xn); }
#if !defined(__AVX512F__)
EVENTLM_INLINE f32x16 to_floats(i32x16 value) {
  return natively<f32x16>([](f32xn part) { return to_floats((i32xn)part); }, value);
}
#endif

EVENTLM_INLINE f32x16 magnitude(f32x16 value) { return (f32x16)((u32x16)value & 0x7fffffffu); }

// To the nearest integer, of numbers below 2^22.
EVENTLM_INLINE f32xn rounded(f32xn x) {
#if defined(__AVX512F__)
  return (f32xn)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  // Behind 1.5 * 2^23 there is no room for a fraction.
  return (x + 12582912.0f) - 12582912.0f;
#endif
}

EVENTLM_INLINE f32x16 vmax(f32x16 a, f32x16 b) {
  return natively<f32x16>([](f32xn left, f32xn right) { return left > right ? left : right; }, a, b);
}

EVENTLM_INLINE float sum_of(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += v[lane];
  return total;
#endif
}

EVENTLM_INLINE std::int32_t sum_of(i32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  std::int32_t total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += v[lane];
  return total;
#endif
}

EVENTLM_INLINE float max_of(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int lane = 1; lane < kLanes; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
#endif
}

// The number of the first of 32 lanes that is not zero, of which there is one.
EVENTLM_INLINE int first_lane(i32x16 left, i32x16 right) {
#if defined(__AVX512F__)
  const auto mask = [](i32x16 lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); };
  return __builtin_ctz(mask(left) | static_cast<unsigned>(mask(right)) << kLanes);
#else
  int lane = 0;
  while (lane < kLanes && left[lane] == 0) lane++;
  while (lane >= kLanes && right[lane - kLanes] == 0) lane++;
  return lane;
#endif
}

EVENTLM_INLINE bool any_above(f32x16 v, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
  return max_of(v) > bound;
#endif
}

// 2^x to 2 units in the last place; 0 for minus infinity. A NaN stays one: of two that cannot be compared `vmax` gives
// the second.
EVENTLM_INLINE f32xn exp2_native(f32xn x) {
#if defined(__AVX512F__)
  const f32xn least = f32xn{} - 200.0f;
  // So low that the scaling below gives 0, and no infinity is subtracted from another.
  x = least > x ? least : x;
  const f32xn whole = (f32xn)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const f32xn rest = x - whole;
#else
  const f32xn least = f32xn{} - 126.0f, most = f32xn{} + 127.0f;
  const i32xn is_zero = x < least;
  x = least > x ? least : x;
  x = x > most ? most : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then is in the low bits.
  const f32xn shifted = x + 12582912.0f;
  const f32xn rest = x - (shifted - 12582912.0f);
#endif
  f32xn p = f32xn{} + 1.5353362e-4f;
  p = p * rest + 1.3398874e-3f;
  p = p * rest + 9.6184373e-3f;
  p = p * rest + 5.5503324e-2f;
  p = p * rest + 2.4022649e-1f;
  p = p * rest + 6.9314720e-1f;
  p = p * rest + 1.0f;
#if defined(__AVX512F__)
  return (f32xn)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return is_zero ? f32xn{} : (f32xn)((i32xn)p + ((i32xn)shifted << 23));
#endif
}

EVENTLM_INLINE f32x16 exp2_of(f32x16 x) { return natively<f32x16>(exp2_native, x); }

EVENTLM_INLINE f32x16 sigmoid(f32x16 x) {
  return natively<f32x16>([](f32xn part) { return 1.0f / (1.0f + exp2_native(part * -1.44269504f)); }, x);
}

EVENTLM_INLINE f32x16 silu(f32x16 x) {
  return natively<f32x16>([](f32xn part) { return part / (1.0f + exp2_native(part * -1.44269504f)); }, x);
}

// (up + 1) * gate * sigmoid(1.702 * gate) of numbers that are at most 7, `up` at least -7. A NaN stays one.
EVENTLM_INLINE f32x16 swiglu_oai(f32x16 gate, f32x16 up) {
  return natively<f32x16>(
      [](f32xn gates, f32xn ups) {
        const f32xn most = f32xn{} + 7.0f;
        gates = gates > most ? most : gates;
        ups = ups > most ? most : ups;
        ups = ups < -most ? -most : ups;
        return (ups + 1.0f) * gates / (1.0f + exp2_native(gates * (-1.702f * 1.44269504f)));
      },
      gate, up);
}

// most * tanh(x / most), to 3e-7 of `most`.
EVENTLM_INLINE f32x16 capped(f32x16 x, float most) {
  const float scale = 2.88539008f / most;
  return natively<f32x16>([=](f32xn part) { return most - 2.0f * most / (1.0f + exp2_native(part * scale)); }, x);
}

// x * Phi(x), where Phi(-|x|) is half of erfc(|x| / sqrt(2)), to 1e-7 (Abramowitz and Stegun, 7.1.26).
EVENTLM_INLINE f32x16 gelu(f32x16 x) {
  return natively<f32x16>(
      [](f32xn part) {
        const f32xn size = (f32xn)((u32xn)part & 0x7fffffffu), t = 1.0f / (1.0f + 0.23164189f * size);
        f32xn p = f32xn{} + 0.53070271f;
        p = p * t - 0.72657601f;
        p = p * t + 0.71070687f;
        p = p * t - 0.14224837f;
        p = p * t + 0.12741480f;
        const f32xn beyond = p * t * exp2_native(part * part * -0.72134752f);
        return part * (part > 0.0f ? 1.0f - beyond : beyond);
      },
      x);
}

// The same with Phi(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2.
EVENTLM_INLINE f32x16 gelu_tanh(f32x16 x) {
  return natively<f32x16>(
      [](f32xn part) { return part / (1.0f + exp2_native(part * (part * part * -0.10294324f - 2.30220819f))); }, x);
}

}  // namespace eventlm
