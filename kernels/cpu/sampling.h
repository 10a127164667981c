// Drawing a token: the argmax of scaled logits plus keyed Gumbel noise, the same noise as eventlm/worker/noise.py.
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

// The best of the ids [begin, end) of a row; a temperature of 0 draws greedily. The first of equals.
inline Best draw(const float* logits, std::int32_t begin, std::int32_t end, float temperature, std::uint32_t key_0,
                 std::uint32_t key_1) {
  const u32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float scale = temperature > 0 ? 1.0f / temperature : 1.0f;
  f32x16 scores = splat(-INFINITY);
  u32x16 best = {};
  for (std::int32_t id = begin; id < end; id += kLanes) {
    const u32x16 ids = lanes + static_cast<std::uint32_t>(id);
    f32x16 score = splat(-INFINITY);
    if (id + kLanes <= end) {
      score = load<f32x16>(logits + id) * scale;
    } else {
      for (int lane = 0; id + lane < end; lane++) score[lane] = logits[id + lane] * scale;
    }
    if (temperature > 0) score += gumbel_noise(ids, key_0, key_1);
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

}  // namespace eventlm
