// What attention works on, by vectors and by tiles, and the softmax that both have.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kv_cache.h"
#include "vec.h"

namespace eventlm {

// Query rows (tokens x heads of a key-value head) that share a pass over the context: by vectors, and at most.
constexpr int kVectorRows = 32;
#if defined(__AMX_BF16__)
constexpr int kQueryRows = 128;
#else
constexpr int kQueryRows = kVectorRows;
#endif
// The score of a token that a row does not see, and the maximum of a row that has seen none, beside which it weighs
// nothing. Finite, so that no infinity is subtracted from another.
constexpr float kHidden = -1e30f, kNothingSeen = -1e29f;
constexpr float kLog2E = 1.44269504f;

// Part of a sequence's context, keys and values of one head.
struct ContextRange {
  const std::int32_t* blocks;
  int head;
  int begin, end;  // in tokens; begin is a multiple of 16
};

// Queries of one sequence and one key-value head, and the part of the context that they see.
struct AttentionTile : ContextRange {
  const std::uint32_t* queries[kQueryRows];  // [head_dim / 2] words each, scaled by log2(e) and the model's own scale
  int first[kQueryRows], limit[kQueryRows];  // of the sequence's tokens each row sees [first, limit), both ascending
  int num_rows;
  float soft_cap;      // of scores times log2(e); 0: none
  const float* sinks;  // of each query head of the key-value head, which is `group` of them; null: none
  int group;
};

// Where a pass stands.
struct RowState {
  f32x16 sum;  // of weights, by lane
  float maximum;
};

struct AttentionState {
  RowState rows[kQueryRows];
  alignas(64) float output[kQueryRows * kMaxHeadDim];  // [row][head_dim]
};

constexpr i32x16 kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of `count` scores, those of the tokens from `begin` on: caps them, and hides those that a row does not see.
EVENTLM_INLINE void limit_scores(float* scores, const AttentionTile& tile, int row, int begin, int count) {
  const int first = tile.first[row] - begin, visible = tile.limit[row] - begin;
  for (int c = 0; tile.soft_cap > 0 && c < count; c += kLanes) {
    store(scores + c, capped(load<f32x16>(scores + c), tile.soft_cap));
  }
  if (visible < count) {
    for (int c = 0; c < count; c += kLanes) {
      store(scores + c, kLaneNumbers + c < visible ? load<f32x16>(scores + c) : splat(kHidden));
    }
  }
  for (int c = 0; c < std::min(first, count); c += kLanes) {
    store(scores + c, kLaneNumbers + c >= first ? load<f32x16>(scores + c) : splat(kHidden));
  }
}

// Raises a row's maximum to that of these scores; returns what it scales its sum, and the caller its output by.
EVENTLM_INLINE float raise(const float* scores, int count, RowState& row) {
  f32x16 most = load<f32x16>(scores);
  for (int c = kLanes; c < count; c += kLanes) most = vmax(most, load<f32x16>(scores + c));
  if (!any_above(most, row.maximum)) return 1.0f;
  const float before = row.maximum;
  row.maximum = max_of(most);
  const float scale = exp2_of(splat(before - row.maximum))[0];
  row.sum *= scale;
  return scale;
}

// 2^x for x up to 0, to 3e-6 of itself: weights are rounded to much less.
EVENTLM_INLINE f32x16 weight_of(f32x16 x) {
#if defined(__AVX512F__)
  // What is left beside the next lower integer, which the scaling finds by itself.
  const f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  f32x16 p = splat(1.35341665e-2f);
  p = p * rest + 5.20114667e-2f;
  p = p * rest + 2.41442751e-1f;
  p = p * rest + 6.93003837e-1f;
  p = p * rest + 1.00000259f;
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return exp2_of(x);
#endif
}

// Numbers of 16 bits in units of a 32,767th of the largest, `most`.
struct Int16Unit {
  float size, inverse;

  explicit Int16Unit(float most) : size(most / 32767.0f), inverse(most > 0 ? 32767.0f / most : 0.0f) {}

  i16x16 narrow(f32x16 values) const {
    constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: what is left after it is added is an integer
    f32x16 scaled = values * inverse;
    scaled = scaled < splat(32767.0f) ? scaled : splat(32767.0f);
    scaled = vmax(scaled, splat(-32767.0f));
    return __builtin_convertvector(__builtin_convertvector((scaled + kRounding) - kRounding, i32x16), i16x16);
  }
};

}  // namespace eventlm
