// The operations of layers that keep a state, as eventlm/models/recurrent.py has them. All of it is float32.
#include "recurrent.h"

#include <cmath>

#include "decoder.h"
#include "pointwise.h"

namespace eventlm {

namespace {

// Tokens whose numbers between two operations are kept.
constexpr int kTokensAtOnce = 64;
// Columns of a head's matrix that are passed over together: they lie in one piece, which stays in the first cache.
constexpr int kParts = 2, kColumns = kParts * kNative;
// Added to the square of the length of a query or key.
constexpr float kLengthEps = 1e-6f;

float length_of(const float* x, std::size_t size) { return std::sqrt(product_of(x, x, size) + kLengthEps); }

void scale(float* x, std::size_t size, float by) {
  for (std::size_t i = 0; i < size; i += kLanes) store(x + i, load<f32x16>(x + i) * by);
}

// Sums over the last tokens of 16 channels. get(token) gives the input, put(token, sum) takes the sum. last: the inputs
// before the first, [num_taps - 1, stride], which the last ones replace. taps: [num_taps, num_channels].
template <class Get, class Put>
EVENTLM_INLINE void convolve(const float* taps, std::size_t num_channels, int num_taps, f32x16 bias, float* last,
                             std::size_t stride, int count, Get&& get, Put&& put) {
  f32x16 weights[kMaxTaps], recent[kMaxTaps];
  for (int i = 0; i < num_taps; i++) weights[i] = load<f32x16>(taps + i * num_channels);
  for (int i = 0; i + 1 < num_taps; i++) recent[i] = load<f32x16>(last + i * stride);
  for (int token = 0; token < count; token++) {
    recent[num_taps - 1] = get(token);
    f32x16 sum = bias;
    for (int i = 0; i < num_taps; i++) sum += weights[i] * recent[i];
    put(token, sum);
    for (int i = 0; i + 1 < num_taps; i++) recent[i] = recent[i + 1];
  }
  for (int i = 0; i + 1 < num_taps; i++) store(last + i * stride, recent[i]);
}

// What a token changes in some columns: matrix = decay * matrix + outer(key, by).
struct Change {
  float decay;
  const float* key;
  f32xn by[kParts];
};

// Products of a key and a query with some columns.
struct Found {
  f32xn of_key[kParts], of_query[kParts];
};

// Passes over columns, [key_dim, kColumns]: makes the change of the token before, and finds the next token's products
// in what that leaves. After the last token memory is asked for the columns that follow.
template <bool IS_CHANGED, bool IS_READ>
EVENTLM_INLINE void pass(float* columns, std::size_t key_dim, const Change& change, const float* key,
                         const float* query, Found& found) {
  f32xn of_key[kParts] = {}, of_query[kParts] = {};
  for (std::size_t i = 0; i < key_dim; i++) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; part++) {
      float* at = columns + i * kColumns + part * kNative;
      f32xn values = load<f32xn>(at);
      if constexpr (IS_CHANGED) {
        values = values * change.decay + change.by[part] * change.key[i];
        store(at, values);
        if constexpr (!IS_READ) __builtin_prefetch(at + key_dim * kColumns);
      }
      if constexpr (IS_READ) {
        of_key[part] += values * key[i];
        of_query[part] += values * query[i];
      }
    }
  }
  if constexpr (IS_READ) {
    for (int part = 0; part < kParts; part++) found.of_key[part] = of_key[part], found.of_query[part] = of_query[part];
  }
}

// Of a token and a head.
struct DeltaFactors {
  float decay, beta, query_key;
};

// Some columns of a head over some tokens; what the head gives replaces the values. inputs: of the first token, from
// one to the next is `stride`.
void run_columns(float* columns, std::size_t key_dim, int count, const float* queries, const float* keys, float* values,
                 std::size_t stride, const DeltaFactors* factors) {
  Change change{};
  Found found;
  for (int token = 0; token < count; token++) {
    const float *key = keys + token * stride, *query = queries + token * stride;
    if (token == 0) {
      pass<false, true>(columns, key_dim, change, key, query, found);
    } else {
      pass<true, true>(columns, key_dim, change, key, query, found);
    }
    const DeltaFactors& now = factors[token];
    change.decay = now.decay;
    change.key = key;
    for (int part = 0; part < kParts; part++) {
      float* at = values + token * stride + part * kNative;
      change.by[part] = (load<f32xn>(at) - found.of_key[part] * now.decay) * now.beta;
      store(at, found.of_query[part] * now.decay + change.by[part] * now.query_key);
    }
  }
  pass<true, false>(columns, key_dim, change, nullptr, nullptr, found);
}

}  // namespace

// What is convolved, and gates, of all rows.
void Decoder::multiply_mixed(Operation& operation, const Instruction& now, int num_rows) {
  const Layer& layer = weights_.layers[now.layer];
  const float* bias = layer.mixed_bias.empty() ? nullptr : layer.mixed_bias.data();
  auto put = [=, this](int row, std::size_t panel, f32x16 left, f32x16 right) {
    float* to = &mixed_[row * mixed_stride_ + panel * kPanel];
    if (bias != nullptr)
      left += load<f32x16>(bias + panel * kPanel), right += load<f32x16>(bias + panel * kPanel + kLanes);
    store(to, left);
    store(to + kLanes, right);
  };
  multiply_shared(operation, team_.size(), layer.mixed, normed_.rows(num_rows, shape_.hidden_size), put,
                  [this] { lap(Part::qkv_proj); });
}

// A unit has 32 channels, and of a state [num_taps - 1, 32].
void Decoder::convolve_rows(Operation& operation, const Step& step, const Instruction& now) {
  const Layer& layer = weights_.layers[now.layer];
  const std::size_t num_channels = now.num_channels, size = (now.num_taps - 1) * kChannels;
  auto convolve_unit = [&](std::size_t unit) {
    auto convolve_some = [&](std::size_t first, int count, float* last) {
      for (std::size_t lane = 0; lane < kChannels; lane += kLanes) {
        const std::size_t channel = unit * kChannels + lane;
        auto at = [&](int token, std::size_t part) {
          return load<f32x16>(&mixed_[(first + token) * mixed_stride_ + part * num_channels + channel]);
        };
        const f32x16 bias = layer.taps_bias.empty() ? f32x16{} : load<f32x16>(&layer.taps_bias[channel]);
        convolve(
            &layer.taps[channel], num_channels, now.num_taps, bias, last + lane, kChannels, count,
            [&](int token) { return at(token, 0) * at(token, 2); },
            [&](int token, f32x16 sum) { attended_.put(first + token, channel, at(token, 1) * sum); });
      }
    };
    step.states.walk(step.rows, now.state + unit * size, size, kTokensAtOnce, convolve_some);
  };
  operation.share(num_channels / kChannels, 1, convolve_unit, [this] { lap(Part::recurrent); });
}

// A unit is a key head with its value heads, neighbours or, interleaved, one from each row of as many as there are key
// heads. Of a state it has the last inputs of its channels, [num_taps - 1], and the columns of each value head.
void Decoder::run_delta(Operation& operation, const Step& step, const Instruction& now) {
  const std::size_t group = now.num_value_heads / now.num_key_heads;
  const std::size_t num_channels = 2 * now.key_dim + group * now.value_dim;
  const std::size_t size = (now.num_taps - 1) * num_channels + group * now.value_dim * now.key_dim;
  auto run_unit = [&](std::size_t unit) {
    step.states.walk(step.rows, now.state + unit * size, size, kTokensAtOnce,
                     [&](std::size_t first, int count, float* state) { run_heads(now, unit, first, count, state); });
  };
  operation.share(now.num_key_heads, 1, run_unit, [this] { lap(Part::recurrent); });
}

// The heads of a unit over up to kTokensAtOnce tokens.
void Decoder::run_heads(const Instruction& now, std::size_t unit, std::size_t first, int count, float* state) {
  const Layer& layer = weights_.layers[now.layer];
  const std::size_t key_dim = now.key_dim, value_dim = now.value_dim, keys_size = now.num_key_heads * key_dim;
  const std::size_t group = now.num_value_heads / now.num_key_heads, hidden = shape_.hidden_size;
  const std::size_t num_channels = 2 * key_dim + group * value_dim;
  float *queries = &mixed_[first * mixed_stride_ + unit * key_dim], *keys = queries + keys_size;
  auto head_of = [&](std::size_t in_group) {
    return now.is_interleaved ? in_group * now.num_key_heads + unit : unit * group + in_group;
  };
  auto values_of = [&](std::size_t head) { return &mixed_[first * mixed_stride_ + 2 * keys_size + head * value_dim]; };
  float* last = state;
  auto convolve_inputs = [&](float* inputs, std::size_t num_inputs) {
    const float* taps = &layer.taps[inputs - &mixed_[first * mixed_stride_]];
    for (std::size_t lane = 0; lane < num_inputs; lane += kLanes, last += kLanes) {
      convolve(
          taps + lane, now.num_channels, now.num_taps, f32x16{}, last, num_channels, count,
          [&](int token) { return load<f32x16>(inputs + token * mixed_stride_ + lane); },
          [&](int token, f32x16 sum) { store(inputs + token * mixed_stride_ + lane, silu(sum)); });
    }
  };
  convolve_inputs(queries, key_dim);
  convolve_inputs(keys, key_dim);
  for (std::size_t in_group = 0; in_group < group; in_group++) convolve_inputs(values_of(head_of(in_group)), value_dim);
  DeltaFactors factors[kTokensAtOnce];
  for (int token = 0; token < count; token++) {
    float *query = queries + token * mixed_stride_, *key = keys + token * mixed_stride_;
    scale(query, key_dim, 1.0f / (length_of(query, key_dim) * std::sqrt(static_cast<float>(key_dim))));
    scale(key, key_dim, 1.0f / length_of(key, key_dim));
    factors[token].query_key = product_of(query, key, key_dim);
  }
  float* columns = state + (now.num_taps - 1) * num_channels;
  for (std::size_t in_group = 0; in_group < group; in_group++) {
    const std::size_t head = head_of(in_group);
    float* values = values_of(head);
    for (int token = 0; token < count; token++) {
      float products[2];
      multiply_exactly<2>(&exact_[(first + token) * hidden_stride_], &layer.delta_rows[2 * head * hidden], hidden,
                          products);
      const float shifted = products[1] + layer.decay_shift[head];
      const float softplus = shifted > 20.0f ? shifted : std::log1p(std::exp(shifted));
      factors[token].decay = std::exp(-std::exp(layer.decay_rate[head]) * softplus);
      factors[token].beta = 1.0f / (1.0f + std::exp(-products[0]));
    }
    for (std::size_t column = 0; column < value_dim; column += kColumns, columns += key_dim * kColumns) {
      run_columns(columns, key_dim, count, queries, keys, values + column, mixed_stride_, factors);
    }
    for (int token = 0; token < count; token++) {
      const float* given = values + token * mixed_stride_;
      const float* gates = &mixed_[(first + token) * mixed_stride_ + layer.gate_column + head * value_dim];
      const float by = inverse_rms(given, value_dim, shape_.eps);
      for (std::size_t i = 0; i < value_dim; i += kLanes) {
        const f32x16 normed = load<f32x16>(given + i) * by * load<f32x16>(&layer.delta_scale[i]);
        attended_.put(first + token, head * value_dim + i, normed * silu(load<f32x16>(gates + i)));
      }
    }
  }
}

}  // namespace eventlm
