// The operations of layers with experts, as eventlm/models/experts.py and decoder.py have them.
//
// A step's rows are grouped by expert, so that each expert's matrices are read once. A token's sum is taken in the
// order of its experts' numbers: each piece of `down` has some of the outputs and passes over all experts.
#include "experts.h"

#include "decoder.h"
#include "pointwise.h"

namespace eventlm {

namespace {

// Of the router, that a row is multiplied by at once.
constexpr std::size_t kExpertsAtOnce = 4;
constexpr std::size_t kPairsPerPiece = 4;

// Of numbers up to a multiple of 16, where those after the last are minus infinity.
void take_softmax(float* x, std::size_t size) {
  f32x16 largest = splat(-INFINITY), sums = {};
  for (std::size_t i = 0; i < size; i += kLanes) largest = vmax(largest, load<f32x16>(x + i));
  const float most = max_of(largest);
  for (std::size_t i = 0; i < size; i += kLanes) {
    const f32x16 power = exp2_of((load<f32x16>(x + i) - most) * kLog2E);
    sums += power;
    store(x + i, power);
  }
  const float sum = sum_of(sums);
  for (std::size_t i = 0; i < size; i += kLanes) store(x + i, load<f32x16>(x + i) / sum);
}

// The number of the largest, of equals the first, which is minus infinity from then on.
int take_largest(float* x, int count) {
  int best = 0;
  for (int i = 1; i < count; i++) best = x[i] > x[best] ? i : best;
  x[best] = -INFINITY;
  return best;
}

float two_largest(const float* x, int count) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < count; i++) {
    if (x[i] > first) {
      second = first, first = x[i];
    } else if (x[i] > second) {
      second = x[i];
    }
  }
  return first + second;
}

// Ranks the experts of other groups last. sums: room for a number of each group.
void keep_best_groups(const Instruction& route, float* ranked, float* sums) {
  const int size = route.num_experts / route.num_groups;
  for (int group = 0; group < route.num_groups; group++) sums[group] = two_largest(ranked + group * size, size);
  for (int i = 0; i < route.num_active_groups; i++) take_largest(sums, route.num_groups);
  for (int group = 0; group < route.num_groups; group++) {
    if (sums[group] != -INFINITY) std::fill_n(ranked + group * size, size, -INFINITY);
  }
}

}  // namespace

void Routing::reserve(std::size_t num_tokens) {
  const std::size_t num_pairs = num_tokens * most_active_;
  grow(products_, num_tokens * kPartsOfToken * stride_);
  grow(experts_, num_pairs);
  grow(shares_, num_pairs);
  grow(slots_, num_pairs);
  grow(tokens_, num_slots(num_tokens));
  grow(slot_shares_, num_slots(num_tokens));
}

void Routing::choose(const Instruction& route, std::size_t token, const float* correction, const float* scale) {
  const std::size_t size = round_up(route.num_experts, kLanes);
  const int num_experts = route.num_experts, num_active = route.num_active;
  float *all = products(token), *ranked = all + stride_;
  std::fill(all + num_experts, all + size, -INFINITY);
  if (route.is_sigmoid) {
    for (std::size_t i = 0; i < size; i += kLanes) store(all + i, sigmoid(load<f32x16>(all + i)));
  } else {
    take_softmax(all, size);
  }
  for (int i = 0; i < num_experts; i++) ranked[i] = correction == nullptr ? all[i] : all[i] + correction[i];
  if (route.num_active_groups < route.num_groups) keep_best_groups(route, ranked, ranked + stride_);
  std::int32_t* experts = &experts_[token * num_active];
  float *shares = &shares_[token * num_active], sum = 0;
  for (int i = 0; i < num_active; i++) experts[i] = take_largest(ranked, num_experts);
  std::sort(experts, experts + num_active);
  for (int i = 0; i < num_active; i++) sum += shares[i] = all[experts[i]];
  const float divisor = route.is_normalized ? std::max(sum, route.min_sum) : 1.0f;
  for (int i = 0; i < num_active; i++) {
    shares[i] = shares[i] / divisor * route.multiplier;
    if (scale != nullptr) shares[i] *= scale[experts[i]];
  }
}

void Decoder::route(Operation* operation, const Instruction& now, std::size_t count) {
  const Layer& layer = weights_.layers[now.layer];
  const std::size_t size = shape_.hidden_size, num_experts = now.num_experts;
  auto multiply_some = [&](std::size_t piece) {
    const std::size_t begin = piece * kExpertsAtOnce, end = std::min(begin + kExpertsAtOnce, num_experts);
    for (std::size_t token = 0; token < count; token++) {
      const float* x = &exact_[token * hidden_stride_];
      float* to = routing_.products(token);
      if (end - begin == kExpertsAtOnce) {
        multiply_exactly<kExpertsAtOnce>(x, &layer.router[begin * size], size, to + begin);
      } else {
        for (std::size_t i = begin; i < end; i++) multiply_exactly<1>(x, &layer.router[i * size], size, to + i);
      }
      for (std::size_t i = begin; !layer.router_bias.empty() && i < end; i++) to[i] += layer.router_bias[i];
    }
  };
  operation[0].share(round_up(num_experts, kExpertsAtOnce) / kExpertsAtOnce, 1, multiply_some,
                     [this] { lap(Part::router); });
  const float* correction = layer.correction.empty() ? nullptr : layer.correction.data();
  const float* scale = layer.expert_scale.empty() ? nullptr : layer.expert_scale.data();
  operation[1].share(
      count, kRowsPerPiece, [&](std::size_t token) { routing_.choose(now, token, correction, scale); },
      [&] {
        routing_.group(now, count, [&](const ExpertRows& rows) {
          return units_of(layer.experts[rows.expert], rows.count).count();
        });
        lap(Part::router);
      });
}

// Of the product of gate and up.
Units Decoder::units_of(const Neurons& expert, int num_rows) const {
  return Units(expert.gate_up, num_rows, team_.size(), expert.gate_up.has_gate ? 2 : 1, routing_.rows().size());
}

void Decoder::scale_inner(Operation& operation, const Instruction& now, std::size_t count) {
  const float* scale = weights_.layers[now.layer].shared_scale.data();
  auto scale_row = [&](std::size_t row) {
    float product;
    multiply_exactly<1>(&exact_[row * hidden_stride_], scale, shape_.hidden_size, &product);
    shared_scales_[row] = sigmoid(splat(product))[0];
  };
  operation.share(count, kRowsPerPiece, scale_row, [this] { lap(Part::gate_up_proj); });
}

void Decoder::pass_experts(Operation* operation, const Instruction& now, std::size_t count) {
  const Layer& layer = weights_.layers[now.layer];
  const std::size_t num_pairs = count * now.num_active, num_neurons = now.num_neurons;
  auto finish = [this] { lap(Part::experts); };
  // All experts have the only row.
  const bool is_gathered = count > 1;
  if (is_gathered) {
    auto gather = [&](std::size_t pair) { gathered_.copy(routing_.slot(pair), normed_, pair / now.num_active); };
    operation[1].share(num_pairs, kPairsPerPiece, gather, finish);
  }
  const RowBuffer& inputs = is_gathered ? gathered_ : normed_;
  auto multiply_unit = [&](std::size_t number) {
    const ExpertRows& own = routing_.rows_of_unit(number);
    const Neurons& part = layer.experts[own.expert];
    const Units units = units_of(part, own.count);
    const Units::Unit unit = units.unit(number - own.first_unit);
    const int first = is_gathered ? own.first : 0, shift = own.first - first;
    put_neurons(part, now.activation, passed_, shift, [&](auto&& put) {
      multiply_any(part.gate_up, unit.panel, unit.last_panel, inputs.rows(own.count, shape_.hidden_size),
                   first + unit.row, first + unit.last_row, put);
    });
  };
  operation[0].share(routing_.num_units(), 1, multiply_unit, finish);
  if (passed_.is_quantized()) {
    auto quantize = [&](std::size_t pair) { passed_.quantize(routing_.slot(pair), num_neurons); };
    operation[2].share(num_pairs, 1, quantize, finish);
  }
  const Units units(layer.experts[0].down, count, team_.size());
  float* sums = has_peers() ? slot() : update_.data();
  auto add_outputs = [&](std::size_t number) {
    const std::size_t begin = number * units.group, end = std::min(begin + units.group, units.num_panels);
    for (std::size_t token = 0; !layer.has_shared() && token < count; token++) {
      float* to = sums + token * hidden_stride_;
      std::fill(to + begin * kPanel, to + end * kPanel, 0.0f);
    }
    for (const ExpertRows& own : routing_.rows()) add_expert(layer.experts[own.expert], own, begin, end, sums);
  };
  operation[3].share(units.num_groups, 1, add_outputs, [this, count] {
    lap(Part::experts);
    if (has_peers()) meet_rows(count);
  });
  if (!has_peers()) return;
  const float* bias = layer.has_shared() && !layer.dense.down_bias.empty() ? layer.dense.down_bias.data() : nullptr;
  add_parts(operation[4], count, [=, this](std::size_t row, std::size_t i, f32x16 sum) {
    if (bias != nullptr) sum += load<f32x16>(bias + i);
    store(&update_[row * hidden_stride_ + i], sum);
  });
}

// Adds some panels of what an expert gives to its tokens' sums. Of peers, only the first has its bias.
void Decoder::add_expert(const Neurons& expert, const ExpertRows& own, std::size_t begin, std::size_t end,
                         float* sums) {
  const bool has_bias = !expert.down_bias.empty() && (!has_peers() || peers_.meeting->number() == 0);
  const float* bias = has_bias ? expert.down_bias.data() : nullptr;
  auto put = [&, this](int pair, std::size_t panel, f32x16 left, f32x16 right) {
    if (bias != nullptr)
      left += load<f32x16>(bias + panel * kPanel), right += load<f32x16>(bias + panel * kPanel + kLanes);
    float* to = sums + routing_.token(pair) * hidden_stride_ + panel * kPanel;
    const float share = routing_.share(pair);
    store(to, load<f32x16>(to) + left * share);
    store(to + kLanes, load<f32x16>(to + kLanes) + right * share);
  };
  multiply_any(expert.down, begin, end, passed_.rows(own.count, expert.down.num_in), own.first, own.first + own.count,
               put);
}

void Decoder::add_update(Operation& operation, float multiplier, std::size_t count) {
  auto add_row = [&](std::size_t row) {
    float* to = &residual_[row * hidden_stride_];
    const float* from = &update_[row * hidden_stride_];
    for (int i = 0; i < shape_.hidden_size; i += kLanes) {
      store(to + i, load<f32x16>(to + i) + load<f32x16>(from + i) * multiplier);
    }
  };
  operation.share(count, kRowsPerPiece, add_row, [this] { lap(Part::experts); });
}

}  // namespace eventlm
