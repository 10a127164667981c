// Keys and values of all sequences in blocks, in one of three formats.
//
// A cache block of one head holds `block_size` tokens in sub-blocks of 16. Keys of a sub-block are [head_dim / 2][16]
// pairs of two elements (of one token), so that one dot product of pairs scores 16 tokens; values are [8][head_dim]
// pairs (of two tokens), so that one adds two tokens. Where an element is one byte, 16 floats lie in front: what each
// token's elements are to be multiplied by. What follows a sequence in its last sub-block is never used, whatever
// it is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "quantize.h"
#include "vec.h"

namespace eventlm {

constexpr int kSubBlock = 16;
constexpr int kMaxHeadDim = 512;

enum class KVFormat : std::int32_t { bf16, int8, fp8 };

// Elements of one byte in 16 bits each.
EVENTLM_INLINE i16xn widened(const std::uint16_t* pairs) { return __builtin_convertvector(load<i8xn>(pairs), i16xn); }

struct Bf16 {
  using Pair = std::uint32_t;
  using Sum = f32xn;
  static constexpr bool kIsScaled = false;

  static u32xn pairs(const Pair* from) { return load<u32xn>(from); }
  static Sum dot(Sum sum, u32xn a, u32xn b) { return dot_pairs(sum, a, b); }
};

// Symmetric, -127 to 127. Its products are those of integers: with queries and weights of 16 bits.
struct Int8 {
  using Pair = std::uint16_t;
  using Sum = i32xn;
  static constexpr bool kIsScaled = true;
  static constexpr float kMost = kInt8Max;

  static u32xn pairs(const Pair* from) { return (u32xn)widened(from); }
  static Sum dot(Sum sum, u32xn a, u32xn b) { return dot_int16_pairs(sum, a, b); }
#if defined(__AMX_BF16__)
  // The even and the odd elements of 16 pairs.
  static void floats(const Pair* from, f32x16& even, f32x16& odd) {
    const u32x16 wide = pairs(from);
    even = __builtin_convertvector((i32x16)(wide << 16) >> 16, f32x16);
    odd = __builtin_convertvector((i32x16)wide >> 16, f32x16);
  }
#endif
  // values: between -kMost and kMost.
  static i32x16 narrow(f32x16 values) { return __builtin_convertvector((values + kRounding) - kRounding, i32x16); }

 private:
  static constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: what is left after it is added is an integer
};

// e4m3 without numbers below 2^-6, which the products of bf16 take for zero. Beside the scale of its token an element
// is at most 448, so those are less than 1/28,000 of the largest.
struct Fp8 {
  using Pair = std::uint16_t;
  using Sum = f32xn;
  static constexpr bool kIsScaled = true;
  static constexpr float kMost = 448.0f;
  // What a product's other side is multiplied by, and its sum again: the elements' exponents stay as they are, which
  // makes them 2^-120 of themselves in bf16.
  static constexpr float kShift = 0x1p60f;

  static u32xn pairs(const Pair* from) { return (u32xn)widened(from) << 4 & 0x87f087f0u; }
  static Sum dot(Sum sum, u32xn a, u32xn b) { return dot_pairs(sum, a, b); }
#if defined(__AMX_BF16__)
  static void floats(const Pair* from, f32x16& even, f32x16& odd) {
    const u32x16 wide = pairs(from);
    even = (f32x16)(wide << 16) * kShift * kShift;
    odd = (f32x16)(wide & 0xffff0000u) * kShift * kShift;
  }
#endif
  static i32x16 narrow(f32x16 values) {
    const u32x16 bits = (u32x16)values, magnitude = bits & 0x7fffffffu;
    const i32x16 rounded = (i32x16)((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120 << 3);
    const i32x16 least = (i32x16)magnitude >= 0x3c000000 ? i32x16{} + 8 : i32x16{};  // from 2^-7 on up to 2^-6
    return (rounded < 8 ? least : rounded) | (i32x16)(bits >> 31 << 7);
  }
};

// A sub-block's elements, and the 16 floats in front of them.
template <class Format>
const typename Format::Pair* elements_of(const std::uint8_t* sub_block) {
  constexpr std::size_t kScales = Format::kIsScaled ? kSubBlock * sizeof(float) : 0;
  return reinterpret_cast<const typename Format::Pair*>(sub_block + kScales);
}
inline const float* scales_of(const void* elements) { return static_cast<const float*>(elements) - kSubBlock; }

// One layer's keys and values.
struct KVCache {
  std::uint8_t* keys;
  std::uint8_t* values;
  KVFormat format;
  int num_kv_heads;
  int block_size;
  int head_dim;

  // Bytes that a token has in a head's keys or values.
  static std::size_t token_bytes(KVFormat format, int head_dim) {
    return format == KVFormat::bf16 ? 2 * head_dim : head_dim + sizeof(float);
  }

  // Where the sub-block begins that holds slot `slot` of the block.
  std::size_t offset(int block, int head, int slot) const {
    const std::size_t before = (static_cast<std::size_t>(block) * num_kv_heads + head) * block_size;
    return (before + slot / kSubBlock * kSubBlock) * token_bytes(format, head_dim);
  }

  // The key or the value of one token, [head_dim] floats.
  void put_key(int block, int head, int slot, const float* key) const {
    narrow(keys + offset(block, head, slot), slot % kSubBlock, key, [this](auto* pairs, int token, const auto* from) {
      using Pair = std::remove_pointer_t<decltype(pairs)>;
      for (int pair = 0; pair < head_dim / 2; pair++) pairs[pair * kSubBlock + token] = load<Pair>(from + pair * 2);
    });
  }
  void put_value(int block, int head, int slot, const float* value) const {
    narrow(values + offset(block, head, slot), slot % kSubBlock, value,
           [this](auto* pairs, int token, const auto* from) {
             using Element = std::remove_cvref_t<decltype(*from)>;
             Element* to = reinterpret_cast<Element*>(pairs) + token / 2 * head_dim * 2 + token % 2;
             for (int d = 0; d < head_dim; d++) to[d * 2] = from[d];
           });
  }

 private:
  // Calls put(the sub-block's pairs, token, elements [head_dim]) with what a token's floats are in this format.
  template <class Put>
  void narrow(std::uint8_t* sub_block, int token, const float* from, Put&& put) const {
    switch (format) {
      case KVFormat::bf16: {
        alignas(64) bf16 elements[kMaxHeadDim];
        for (int d = 0; d < head_dim; d += kLanes) store_bf16(elements + d, load<f32x16>(from + d));
        return put(reinterpret_cast<std::uint32_t*>(sub_block), token, elements);
      }
      case KVFormat::int8:
        return narrow_scaled<Int8>(sub_block, token, from, put);
      case KVFormat::fp8:
        return narrow_scaled<Fp8>(sub_block, token, from, put);
    }
  }

  template <class Format, class Put>
  void narrow_scaled(std::uint8_t* sub_block, int token, const float* from, Put&& put) const {
    alignas(64) std::int8_t elements[kMaxHeadDim];
    store(sub_block + token * sizeof(float), narrow_by_scale<Format>(from, elements));
    put(reinterpret_cast<std::uint16_t*>(sub_block + kSubBlock * sizeof(float)), token, elements);
  }

  // Returns the scale; a NaN if any of them is no finite number.
  template <class Format>
  float narrow_by_scale(const float* from, std::int8_t* to) const {
    f32x16 most = {}, nothing = {};
    for (int d = 0; d < head_dim; d += kLanes) {
      const f32x16 values = load<f32x16>(from + d);
      most = vmax(most, vmax(values, -values));
      nothing += values * 0.0f;
    }
    const Scale scale(max_of(most), Format::kMost);
    for (int d = 0; d < head_dim; d += kLanes) {
      f32x16 values = load<f32x16>(from + d) * scale.inverse;
      values = values < splat(Format::kMost) ? values : splat(Format::kMost);
      values = vmax(values, splat(-Format::kMost));
      store(to + d, __builtin_convertvector(Format::narrow(values), i8x16));
    }
    return scale.step + sum_of(nothing);
  }
};

// All layers', of each its keys and then its values.
struct KVStorage {
  std::uint8_t* const* layers;
  KVFormat format;
  int num_blocks, block_size;

  KVCache layer(int number, int num_kv_heads, int head_dim) const {
    const std::size_t size =
        static_cast<std::size_t>(num_blocks) * num_kv_heads * block_size * KVCache::token_bytes(format, head_dim);
    return {layers[number], layers[number] + size, format, num_kv_heads, block_size, head_dim};
  }
};

}  // namespace eventlm
