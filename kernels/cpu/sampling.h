// Drawing a token: the argmax of scaled logits plus keyed Gumbel noise, the same noise as
// eventlm/worker/sampling/noise.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "vec.h"

namespace eventlm {

// Natural logarithm of positive normal numbers, to 3 units in the last place.
EVENTLM_INLINE f32x16 log_of(f32x16 x) {
  // x = m * 2^e with m in [2/3, 4/3).
  const i32x16 bits = (i32x16)x;
  const i32x16 exponent = (bits - 0x3f2aaaab) >> 23;
  const f32x16 m = (f32x16)(bits - (exponent << 23)) - 1.0f;
  // log(1 + m) by the series in s = m / (2 + m), in fdlibm's form.
  const f32x16 s = m / (m + 2.0f), square = s * s;
  f32x16 p = splat(0.22222222f);
  p = p * square + 0.28571429f;
  p = p * square + 0.4f;
  p = p * square + 0.66666667f;
  const f32x16 half = 0.5f * m * m;
  return __builtin_convertvector(exponent, f32x16) * 0.69314718f + (m - (half - s * (half + square * p)));
}

struct Best {
  float score = -INFINITY;
  std::int32_t id = 0;
};

// Noise of these ids under two keys, as `negative_gumbel_noise` has it, less its sign.
EVENTLM_INLINE f32x16 gumbel_noise(u32x16 ids, std::uint32_t key_0, std::uint32_t key_1) {
  u32x16 bits = ids ^ (ids >> 16);
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits *= 0x846ca68bu;
  bits ^= bits >> 16;
  bits ^= key_0;
  bits *= 0x21f0aaadu;
  bits ^= (u32x16)((i32x16)bits >> 15);
  bits ^= key_1;
  bits *= 0x735a2d97u;
  bits ^= (u32x16)((i32x16)bits >> 16);
  constexpr float kUnit = 4.6566128e-10f * (1.0f - 5.9604645e-8f);
  const f32x16 uniform = (__builtin_convertvector((i32x16)bits, f32x16) + 0.5f) * kUnit;
  // -log(1 - uniform) without losing what is small (Kahan).
  const f32x16 rest = 1.0f - uniform;
  const f32x16 exponential = rest == 1.0f ? uniform : log_of(rest) * uniform / (rest - 1.0f);
  return -log_of(exponential);
}

// How a row's token is drawn: greedily at temperature 0, else with the noise of its sequence's key and of its position
// in the output. The position steps through SplitMix64, as `noise_keys` has it.
class Draw {
 public:
  Draw(float temperature, std::uint64_t key, std::int64_t position)
      : scale_(1.0f / temperature), is_greedy_(!(temperature > 0)) {
    std::uint64_t bits = key + (static_cast<std::uint64_t>(position) + 1) * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    key_0_ = static_cast<std::uint32_t>(bits);
    key_1_ = static_cast<std::uint32_t>(bits >> 32);
  }

  // The best token has the highest score. NaN becomes plus infinity, so that a row whose logits are not finite shows in
  // its best score. One expression, so that all callers get the same bits.
  EVENTLM_INLINE f32x16 scores(f32x16 logits, u32x16 ids) const {
    const f32x16 score = is_greedy_ ? logits : logits * scale_ + gumbel_noise(ids, key_0_, key_1_);
    return score < splat(INFINITY) ? score : splat(INFINITY);
  }

 private:
  float scale_;
  bool is_greedy_;
  std::uint32_t key_0_, key_1_;
};

constexpr u32x16 kLaneIds = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The best of the ids [begin, end) of a row's logits. The first of equals.
inline Best best_of(const Draw& draw, const float* logits, std::int32_t begin, std::int32_t end) {
  f32x16 scores = splat(-INFINITY);
  u32x16 best = {};
  for (std::int32_t id = begin; id < end; id += kLanes) {
    f32x16 row = splat(-INFINITY);
    if (id + kLanes <= end) {
      row = load<f32x16>(logits + id);
    } else {
      for (int lane = 0; id + lane < end; lane++) row[lane] = logits[id + lane];
    }
    const u32x16 ids = kLaneIds + static_cast<std::uint32_t>(id);
    const f32x16 score = draw.scores(row, ids);
    const i32x16 is_better = score > scores;
    scores = is_better ? score : scores;
    best = is_better ? ids : best;
  }
  Best found;
  for (int lane = 0; lane < kLanes; lane++) {
    const bool is_better = scores[lane] > found.score;
    const bool is_earlier = scores[lane] == found.score && best[lane] < static_cast<std::uint32_t>(found.id);
    if (is_better || is_earlier) found = {scores[lane], static_cast<std::int32_t>(best[lane])};
  }
  return found;
}

// The best of the 32 ids from `first` on, of those below `end`.
EVENTLM_INLINE Best best_of(const Draw& draw, f32x16 left, f32x16 right, std::int32_t first, std::int32_t end) {
  const u32x16 ids = kLaneIds + static_cast<std::uint32_t>(first);
  f32x16 low = draw.scores(left, ids), high = draw.scores(right, ids + kLanes);
  if (first + 2 * kLanes > end) {
    low = (i32x16)ids < end ? low : splat(-INFINITY);
    high = (i32x16)ids + kLanes < end ? high : splat(-INFINITY);
  }
  const float most = max_of(vmax(low, high));
  if (most == -INFINITY) return {};
  return {most, first + first_lane(low == most, high == most)};
}

}  // namespace eventlm
