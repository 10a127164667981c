// What is done to one token's vectors between the products.
#pragma once

#include <cmath>

#include "program.h"
#include "vec.h"
#include "weights.h"

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

// The products of a vector with `COUNT` others that follow one another, of float32; size is a multiple of 16.
template <int COUNT>
EVENTLM_INLINE void multiply_exactly(const float* x, const float* others, std::size_t size, float* out) {
  f32x16 sums[COUNT] = {};
  for (std::size_t i = 0; i < size; i += kLanes) {
    const f32x16 values = load<f32x16>(x + i);
#pragma GCC unroll 8
    for (int other = 0; other < COUNT; other++) sums[other] += values * load<f32x16>(others + other * size + i);
  }
  for (int other = 0; other < COUNT; other++) out[other] = sum_of(sums[other]);
}

EVENTLM_INLINE float product_of(const float* a, const float* b, std::size_t size) {
  float product;
  multiply_exactly<1>(a, b, size, &product);
  return product;
}

// Calls put(i, 16 numbers from i on) with all of a norm of x; size is a multiple of 16.
template <class Put>
EVENTLM_INLINE void norm_of(const float* x, const Norm& norm, std::size_t size, Put&& put) {
  const float* weight = norm.weight.data();
  if (norm.bias.empty()) {
    const float scale = inverse_rms(x, size, norm.eps);
    for (std::size_t i = 0; i < size; i += kLanes) put(i, load<f32x16>(x + i) * scale * load<f32x16>(weight + i));
    return;
  }
  f32x16 sums = {}, squares = {};
  for (std::size_t i = 0; i < size; i += kLanes) sums += load<f32x16>(x + i);
  const float mean = sum_of(sums) / static_cast<float>(size);
  for (std::size_t i = 0; i < size; i += kLanes) {
    const f32x16 value = load<f32x16>(x + i) - mean;
    squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + norm.eps);
  for (std::size_t i = 0; i < size; i += kLanes) {
    put(i, (load<f32x16>(x + i) - mean) * scale * load<f32x16>(weight + i) + load<f32x16>(norm.bias.data() + i));
  }
}

// The first `num_turned` pairs of a head's first `size` elements turn, by the position's angles. Of neighbours, they
// are there for each element, the sine of an even one negative.
struct Rotation {
  const float *cosines, *sines;
  int size, num_turned;
  bool is_interleaved;
};

// One head in place: the norm of its vector if there is one, then its two halves, or neighbours, turned.
EVENTLM_INLINE void turn_head(float* head, int head_dim, const Norm* norm, const Rotation& rotation) {
  const float* weight = norm ? norm->weight.data() : nullptr;
  const float scale = norm ? inverse_rms(head, head_dim, norm->eps) : 1.0f;
  auto norm_alone = [=](int begin, int end) {
    for (int d = begin; norm && d < end; d++) head[d] = head[d] * scale * weight[d];
  };
  const float *cosines = rotation.cosines, *sines = rotation.sines;
  const int half = rotation.size / 2, count = rotation.num_turned;
  int i = 0;
  if (rotation.is_interleaved) {
    norm_alone(0, head_dim);
    for (; i + kLanes <= 2 * count; i += kLanes) {
      const f32x16 x = load<f32x16>(head + i);
      store(head + i, x * load<f32x16>(cosines + i) + exchange_lanes<1>(x) * load<f32x16>(sines + i));
    }
    for (; i < 2 * count; i += 2) {
      const float even = head[i], odd = head[i + 1];
      head[i] = even * cosines[i] + odd * sines[i];
      head[i + 1] = odd * cosines[i + 1] + even * sines[i + 1];
    }
    return;
  }
  for (; i + kLanes <= count; i += kLanes) {
    f32x16 first = load<f32x16>(head + i) * scale, second = load<f32x16>(head + half + i) * scale;
    if (norm) first *= load<f32x16>(weight + i), second *= load<f32x16>(weight + half + i);
    const f32x16 cosine = load<f32x16>(cosines + i), sine = load<f32x16>(sines + i);
    store(head + i, first * cosine - second * sine);
    store(head + half + i, second * cosine + first * sine);
  }
  for (; i < count; i++) {
    const float first = head[i] * scale * (norm ? weight[i] : 1.0f);
    const float second = head[half + i] * scale * (norm ? weight[half + i] : 1.0f);
    head[i] = first * cosines[i] - second * sines[i];
    head[half + i] = second * cosines[i] + first * sines[i];
  }
  norm_alone(count, half);
  norm_alone(half + count, head_dim);
}

// What the neurons make of their sums.
inline f32x16 activated(Activation activation, f32x16 x) {
  switch (activation) {
    case Activation::silu:
      return silu(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::relu2:
      x = vmax(f32x16{}, x);  // of a NaN the second
      return x * x;
    case Activation::swiglu_oai:
      break;  // only with a gate
  }
  __builtin_unreachable();
}

// The same of gate and up.
inline f32x16 gated(Activation activation, f32x16 gate, f32x16 up) {
  return activation == Activation::swiglu_oai ? swiglu_oai(gate, up) : activated(activation, gate) * up;
}

// Calls multiply(put), where put takes products of gate and up, or of up alone, and puts what the activation makes of
// them `shift` rows further.
template <class Multiply>
void put_neurons(const Neurons& part, Activation activation, RowBuffer& to, int shift, Multiply&& multiply) {
  const float* bias = part.gate_up_bias.empty() ? nullptr : part.gate_up_bias.data();
  auto add_bias = [bias](std::size_t panel, f32x16& left, f32x16& right) {
    if (bias == nullptr) return;
    left += load<f32x16>(bias + panel * kPanel), right += load<f32x16>(bias + panel * kPanel + kLanes);
  };
  if (part.is_gated && activation == Activation::silu) {
    return multiply([&](int row, std::size_t panel, f32x16 gate, f32x16 up) {
      add_bias(panel, gate, up);
      to.put(row + shift, panel * kLanes, silu(gate) * up);
    });
  }
  multiply([&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    add_bias(panel, left, right);
    if (part.is_gated) return to.put(row + shift, panel * kLanes, gated(activation, left, right));
    to.put(row + shift, panel * kPanel, activated(activation, left));
    to.put(row + shift, panel * kPanel + kLanes, activated(activation, right));
  });
}

}  // namespace eventlm
