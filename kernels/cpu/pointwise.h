// What is done to one token's vectors between the products.
#pragma once

#include <cmath>

#include "rows.h"
#include "vec.h"

namespace eventlm {

// 1 / sqrt(mean(x^2) + eps); size is a multiple of 16.
EVENTLM_INLINE float inverse_rms(const float* x, std::size_t size, float eps) {
  f32x16 squares = {};
  for (std::size_t i = 0; i < size; i += kLanes) {
    const f32x16 value = load<f32x16>(x + i);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
}

// x * inverse rms * weight as a row of `out`; size is a multiple of 16.
EVENTLM_INLINE void rms_norm(const float* x, const float* weight, std::size_t size, float eps, RowBuffer& out,
                             std::size_t row) {
  const float scale = inverse_rms(x, size, eps);
  for (std::size_t i = 0; i < size; i += kLanes)
    out.put(row, i, load<f32x16>(x + i) * scale * load<f32x16>(weight + i));
}

// One head in place: the norm of its vector if there is a weight, then its two halves turned by the position's angles.
EVENTLM_INLINE void turn_head(float* head, int head_dim, const float* norm, float eps, const float* cosines,
                              const float* sines) {
  const int half = head_dim / 2;
  const float scale = norm ? inverse_rms(head, head_dim, eps) : 1.0f;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    f32x16 first = load<f32x16>(head + i) * scale, second = load<f32x16>(head + half + i) * scale;
    if (norm) first *= load<f32x16>(norm + i), second *= load<f32x16>(norm + half + i);
    const f32x16 cosine = load<f32x16>(cosines + i), sine = load<f32x16>(sines + i);
    store(head + i, first * cosine - second * sine);
    store(head + half + i, second * cosine + first * sine);
  }
  for (; i < half; i++) {
    const float first = head[i] * scale * (norm ? norm[i] : 1.0f);
    const float second = head[half + i] * scale * (norm ? norm[half + i] : 1.0f);
    head[i] = first * cosines[i] - second * sines[i];
    head[half + i] = second * cosines[i] + first * sines[i];
  }
}

}  // namespace eventlm
