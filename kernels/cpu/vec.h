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
typedef std::int16_t i16x32 __attribute__((vector_size(64)));
typedef std::int8_t i8x16 __attribute__((vector_size(16)));
typedef std::int8_t i8x32 __attribute__((vector_size(32)));
typedef std::uint8_t u8x16 __attribute__((vector_size(16)));

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

EVENTLM_INLINE f32x16 splat(float value) { return f32x16{} + value; }

EVENTLM_INLINE float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Round to nearest, ties to even; a NaN stays one.
EVENTLM_INLINE bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

EVENTLM_INLINE f32x16 load_bf16(const bf16* from) {
  return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}

EVENTLM_INLINE u32x16 bf16_bits(f32x16 value) {
  const u32x16 bits = (u32x16)value;
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (value == value) ? rounded : (bits >> 16) | 0x40;
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
  const auto low = (u16x16)_mm512_cvtneps_pbh((__m512)even), high = (u16x16)_mm512_cvtneps_pbh((__m512)odd);
  return __builtin_convertvector(low, u32x16) | __builtin_convertvector(high, u32x16) << 16;
#else
  return bf16_bits(even) | bf16_bits(odd) << 16;
#endif
}

// `sum + a.even * b.even + a.odd * b.odd`, where each 32-bit lane of a and b holds two bf16, the even one low.
EVENTLM_INLINE f32x16 dot_pairs(f32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  sum += (f32x16)(a << 16) * (f32x16)(b << 16);
  return sum + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}

// The same of 16-bit integers; what overflows 32 bits is lost.
EVENTLM_INLINE i32x16 dot_int16_pairs(i32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BW__)
  return sum + (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  __m256i x[2], y[2];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int half = 0; half < 2; half++) x[half] = _mm256_madd_epi16(x[half], y[half]);
  return sum + load<i32x16>(x);
#elif defined(__SSE2__)
  __m128i x[4], y[4];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (int quarter = 0; quarter < 4; quarter++) x[quarter] = _mm_madd_epi16(x[quarter], y[quarter]);
  return sum + load<i32x16>(x);
#else
  const i32x16 even = ((i32x16)(a << 16) >> 16) * ((i32x16)(b << 16) >> 16);
  return sum + even + ((i32x16)a >> 16) * ((i32x16)b >> 16);
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

EVENTLM_INLINE f32x16 to_floats(i32x16 value) { return __builtin_convertvector(value, f32x16); }

EVENTLM_INLINE f32x16 magnitude(f32x16 value) { return (f32x16)((u32x16)value & 0x7fffffffu); }

EVENTLM_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

EVENTLM_INLINE float sum_of(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
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
EVENTLM_INLINE f32x16 exp2_of(f32x16 x) {
#if defined(__AVX512F__)
  // So low that the scaling below gives 0, and no infinity is subtracted from another.
  x = vmax(splat(-200.0f), x);
  const f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  const f32x16 rest = x - whole;
#else
  const i32x16 is_zero = x < splat(-126.0f);
  x = vmax(splat(-126.0f), x);
  x = x > splat(127.0f) ? splat(127.0f) : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer, which then is in the low bits.
  const f32x16 shifted = x + 12582912.0f;
  const f32x16 rest = x - (shifted - 12582912.0f);
#endif
  f32x16 p = splat(1.5353362e-4f);
  p = p * rest + 1.3398874e-3f;
  p = p * rest + 9.6184373e-3f;
  p = p * rest + 5.5503324e-2f;
  p = p * rest + 2.4022649e-1f;
  p = p * rest + 6.9314720e-1f;
  p = p * rest + 1.0f;
#if defined(__AVX512F__)
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return is_zero ? f32x16{} : (f32x16)((i32x16)p + ((i32x16)shifted << 23));
#endif
}

EVENTLM_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp2_of(x * -1.44269504f)); }

}  // namespace eventlm
