#include "decoder.h"

#include "pointwise.h"

namespace eventlm {

namespace {

// The most that one of a kind is made of, see Decoder::run. With peers those that leave sums to them have one more, and
// so has attention with sharers.
std::size_t num_operations(Kind kind, bool has_peers, bool has_sharers) {
  if (kind == Kind::experts) return has_peers ? 5 : 4;
  if (kind == Kind::embed || kind == Kind::multiply || kind == Kind::multiply_add) return has_peers ? 2 : 1;
  if (kind == Kind::attend) return has_sharers ? 4 : 3;
  if (kind == Kind::convolve || kind == Kind::delta) return 3;
  if (kind == Kind::activate || kind == Kind::activate_input || kind == Kind::inputs) return 2;
  return kind == Kind::heads || kind == Kind::route ? 2 : 1;
}

template <class Value>
std::int32_t most_of(const std::vector<Instruction>& program, Value&& value) {
  std::int32_t most = 0;
  for (const Instruction& now : program) most = std::max(most, static_cast<std::int32_t>(value(now)));
  return most;
}

std::int32_t most_neurons(const std::vector<Instruction>& program, Kind kind) {
  return most_of(program, [kind](const Instruction& now) { return now.kind == kind ? now.num_neurons : 0; });
}

Inputs inputs_of(const Weights& weights, bool is_int8) {
  return is_int8 ? Inputs::int8 : weights.has_codes ? Inputs::packed : Inputs::bf16;
}

// Of `output` in layers that have a state, and of the product before in those.
std::int32_t num_given(const Instruction& now) {
  return now.kind == Kind::convolve ? now.num_channels : now.num_value_heads * now.value_dim;
}
std::int32_t num_mixed(const Instruction& now) {
  return now.kind == Kind::convolve ? 3 * now.num_channels
                                    : static_cast<std::int32_t>(round_up(now.num_channels, kPanel)) + num_given(now);
}

// Up to its own.
std::int32_t num_ropes(const Instruction& now) { return now.kind == Kind::heads ? now.rope + 1 : 0; }
bool is_kept(const Instruction& now) { return now.kind == Kind::keep; }
bool needs_exact(const Instruction& now) { return now.kind == Kind::route || now.kind == Kind::delta; }
// Elements of all query heads: inputs of `output`; and of all keys.
std::size_t query_size(const Instruction& now) { return static_cast<std::size_t>(now.num_heads) * now.head_dim; }
std::size_t key_size(const Instruction& now) { return static_cast<std::size_t>(now.num_kv_heads) * now.head_dim; }

// Of a row of gates.
std::size_t gates_size(const Instruction& now) { return now.has_output_gate ? query_size(now) + kLanes : 0; }

bool is_whole(const Instruction& now) { return now.kind == Kind::heads && now.qk_norm == QkNorm::whole; }

}  // namespace

Decoder::Decoder(const Shape& shape, const std::vector<Instruction>& program, const float* const* cosines,
                 const float* const* sines, bool is_int8, const std::vector<TypedWeight>& types, const Peers& peers,
                 const Sharers& sharers, int num_threads)
    : shape_(shape),
      program_(program),
      peers_(peers),
      sharers_(sharers),
      shards_(sharers.shards()),
      cosines_(cosines, cosines + most_of(program, num_ropes)),
      sines_(sines, sines + most_of(program, num_ropes)),
      team_(num_threads),
      weights_(shape, program, is_int8, types),
      hidden_stride_(round_up(shape.hidden_size, kPanel) + kLanes),
      query_stride_(round_up(most_of(program, query_size) / 2, kLanes) + kLanes),
      raw_stride_(most_of(program, [](const Instruction& now) { return query_size(now) + key_size(now); }) + kLanes),
      gate_stride_(most_of(program, gates_size)),
      mixed_stride_(round_up(most_of(program, num_mixed), kPanel) + kLanes),
      inputs_stride_(shape.inputs_size * shape.num_layers + kLanes),
      has_updates_(
          most_of(program,
                  [](const Instruction& now) { return now.kind == Kind::multiply || now.kind == Kind::experts; }) > 0),
      has_kept_(most_of(program, is_kept) > 0),
      has_raw_heads_(most_of(program, is_whole) > 0),
      has_exact_(most_of(program, needs_exact) > 0),
      normed_(shape.hidden_size, inputs_of(weights_, is_int8)),
      attended_(std::max(most_of(program, query_size), most_of(program, num_given)), inputs_of(weights_, is_int8)),
      inner_(std::max(most_neurons(program, Kind::activate), most_neurons(program, Kind::activate_input)),
             inputs_of(weights_, is_int8)),
      routing_(program),
      gathered_(routing_.is_used() ? shape.hidden_size : 0, inputs_of(weights_, is_int8)),
      passed_(most_neurons(program, Kind::experts), inputs_of(weights_, is_int8)) {
  std::size_t count = 0;
  for (const Instruction& now : program_) {
    first_operations_.push_back(count);
    count += num_operations(now.kind, has_peers(), sharers_.meeting != nullptr);
    if (now.kind == Kind::attend) plan_of(now);
  }
  operations_ = std::vector<Operation>(count);
}

AttentionPlan& Decoder::plan_of(const Instruction& attend) {
  for (AttentionPlan& plan : plans_) {
    if (plan.is_for(attend)) return plan;
  }
  return plans_.emplace_back(attend);
}

void Decoder::reserve(std::size_t num_tokens) {
  grow(residual_, num_tokens * hidden_stride_);
  if (has_updates_) grow(update_, num_tokens * hidden_stride_);
  if (has_kept_) grow(kept_, num_tokens * hidden_stride_);
  if (inputs_stride_ > kLanes) grow(inputs_, num_tokens * inputs_stride_);
  if (has_raw_heads_) grow(raw_heads_, num_tokens * raw_stride_);
  grow(queries_, num_tokens * query_stride_);
  grow(gates_, num_tokens * gate_stride_);
  if (mixed_stride_ > kLanes) grow(mixed_, num_tokens * mixed_stride_);
  if (has_exact_) grow(exact_, num_tokens * hidden_stride_);
  normed_.reserve(num_tokens);
  attended_.reserve(num_tokens);
  inner_.reserve(num_tokens);
  if (routing_.is_used()) {
    grow(shared_scales_, num_tokens);
    routing_.reserve(num_tokens);
    gathered_.reserve(num_tokens > 1 ? routing_.num_slots(num_tokens) : 0);
    passed_.reserve(routing_.num_slots(num_tokens));
  }
}

void Decoder::lap(Part part) {
  const std::int64_t now = now_ns();
  times_[static_cast<int>(part)] += now - last_ns_;
  last_ns_ = now;
}

void Decoder::forward(const std::int32_t* token_ids, const std::vector<StepRow>& rows, std::int32_t num_shared,
                      const KVStorage& kv, const States& states, const float* given, float* hidden) {
  Step step{token_ids, rows, num_shared, kv, states, 0, {}};
  token_rows_.clear();
  for (std::size_t row = 0; row < rows.size(); row++) {
    step.first_token.push_back(static_cast<std::int32_t>(step.num_tokens));
    step.num_tokens += rows[row].num_tokens;
    token_rows_.insert(token_rows_.end(), rows[row].num_tokens, static_cast<std::int32_t>(row));
  }
  reserve(step.num_tokens);
  for (AttentionPlan& plan : plans_) {
    plan.make(rows, shards_, team_.size());
    grow(partials_, static_cast<std::size_t>(plan.num_partials) * plan.num_heads * (plan.head_dim + 2));
  }
  for (Operation& operation : operations_) operation.reset();
  for (std::size_t token = 0; given != nullptr && token < step.num_tokens; token++) {
    std::copy_n(given + token * shape_.hidden_size, shape_.hidden_size, &residual_[token * hidden_stride_]);
  }
  last_ns_ = now_ns();
  if (rows.empty()) {
    for (const Instruction& now : program_) {
      if (now.kind == Kind::attend) meet_sharers(now, num_shared);
    }
    return throw_if_ended();
  }
  team_.run([&] { run_program(step); });
  throw_if_ended();
  for (std::size_t token = 0; token < step.num_tokens; token++) {
    std::copy_n(&residual_[token * hidden_stride_], shape_.hidden_size, hidden + token * shape_.hidden_size);
  }
}

void Decoder::run_program(const Step& step) {
  for (std::size_t number = 0; number < program_.size(); number++) {
    // A thread that comes late passes over what is done.
    const bool is_last = number + 1 == program_.size();
    if (!is_last && operations_[first_operations_[number + 1]].is_done()) continue;
    // All that is in hand has been done. None waits for one that goes.
    if (has_ended()) return;
    run(step, program_[number], &operations_[first_operations_[number]]);
  }
}

// The first operation of each kind is never left out.
void Decoder::run(const Step& step, const Instruction& now, Operation* operation) {
  Layer& layer = weights_.layers[now.layer];
  const std::size_t count = step.num_tokens;
  switch (now.kind) {
    case Kind::embed:
      return embed(operation, step, now.multiplier);
    case Kind::norm:
      return norm_rows(operation[0], layer.norm(now.weight), now.multiplier, count);
    case Kind::take:
      return take_rows(operation[0], count);
    case Kind::heads:
      multiply_heads(operation[0], step, now);
      return norm_raw_heads(operation[1], step, now);
    case Kind::attend:
      attend_all(operation, step, now);
      return quantize_rows(operation[2], attended_, query_size(now), count, Part::attention);
    case Kind::activate:
      multiply_neurons(operation[0], now, static_cast<int>(count));
      return quantize_rows(operation[1], inner_, now.num_neurons, count, Part::gate_up_proj);
    case Kind::multiply_add:
    case Kind::multiply:
      return multiply_out(operation, now, static_cast<int>(count));
    case Kind::add_normed:
      return add_normed(operation[0], layer.norm(now.weight), now.multiplier, count);
    case Kind::route:
      return route(operation, now, count);
    case Kind::scale_inner:
      return scale_inner(operation[0], now, count);
    case Kind::experts:
      return pass_experts(operation, now, count);
    case Kind::add:
      return add_update(operation[0], now.multiplier, count);
    case Kind::inputs:
      return make_inputs(operation, step, now.multiplier);
    case Kind::activate_input:
      multiply_input(operation[0], now, static_cast<int>(count));
      return quantize_rows(operation[1], inner_, now.num_neurons, count, Part::layer_inputs);
    case Kind::scale:
      return scale_rows(operation[0], layer.scale, count);
    case Kind::keep:
    case Kind::add_kept:
      return keep_normed(operation[0], layer.norm(now.weight), now.kind == Kind::add_kept, count);
    case Kind::convolve:
      multiply_mixed(operation[0], now, static_cast<int>(count));
      convolve_rows(operation[1], step, now);
      return quantize_rows(operation[2], attended_, num_given(now), count, Part::recurrent);
    case Kind::delta:
      multiply_mixed(operation[0], now, static_cast<int>(count));
      run_delta(operation[1], step, now);
      return quantize_rows(operation[2], attended_, num_given(now), count, Part::recurrent);
  }
}

void Decoder::throw_if_ended() const {
  for (const Meeting* meeting : {peers_.meeting, sharers_.meeting}) {
    if (has_ended(meeting)) throw MeetingEnded(meeting->state());
  }
}

// One thread does it, as an operation ends whose result others wait for.
void Decoder::meet(Meeting& meeting, std::size_t num_bytes) {
  meeting.meet(num_bytes);
  lap(Part::meeting);
}

// Once all that this member has of the shared rows of a layer lies in its slot.
void Decoder::meet_sharers(const Instruction& now, std::int32_t num_shared) {
  if (num_shared == 0) return;
  meet(*sharers_.meeting, num_shared * now.num_heads * (now.head_dim + 2) * sizeof(float));
}

// id: counted from its own first one.
void Decoder::look_up(std::int32_t id, float multiplier, float* to) const {
  const std::size_t size = shape_.hidden_size;
  const Matrix& packed = shape_.is_tied ? weights_.lm_head : weights_.packed_embedding;
  if (weights_.embedding == nullptr) {
    packed.unpack(id, to);
  } else {
    const bf16* from = weights_.embedding + id * size;
    for (std::size_t i = 0; i < size; i++) to[i] = to_float(from[i]);
  }
  for (std::size_t i = 0; multiplier != 1.0f && i < size; i++) to[i] *= multiplier;
}

void Decoder::embed(Operation* operation, const Step& step, float multiplier) {
  if (!is_vocab_split()) {
    auto embed_token = [&](std::size_t token) {
      look_up(step.token_ids[token], multiplier, &residual_[token * hidden_stride_]);
    };
    return operation[0].share(step.num_tokens, kRowsPerPiece, embed_token, [this] { lap(Part::embed); });
  }
  const std::vector<std::int32_t>& starts = peers_.vocab_starts;
  const Meeting& meeting = *peers_.meeting;
  auto member_of = [&](std::size_t token) {
    return static_cast<int>(std::upper_bound(starts.begin(), starts.end(), step.token_ids[token]) - starts.begin()) - 1;
  };
  float* own = slot();
  auto embed_own = [&](std::size_t token) {
    if (member_of(token) != meeting.number()) return;
    look_up(step.token_ids[token] - first_id(), multiplier, own + token * hidden_stride_);
  };
  operation[0].share(step.num_tokens, kRowsPerPiece, embed_own, [this, &step] {
    lap(Part::embed);
    meet_rows(step.num_tokens);
  });
  auto take_row = [&](std::size_t token) {
    const std::size_t at = token * hidden_stride_;
    const auto from = reinterpret_cast<const float*>(meeting.part(member_of(token)));
    std::copy_n(from + at, shape_.hidden_size, &residual_[at]);
  };
  operation[1].share(step.num_tokens, kRowsPerPiece, take_row, [this] { lap(Part::add_parts); });
}

EVENTLM_INLINE void Decoder::put_normed(std::size_t row, std::size_t input, f32x16 values) {
  normed_.put(row, input, values);
  if (has_exact_) store(&exact_[row * hidden_stride_ + input], values);
}

// Returns with all rows of the residual stream normed, as inputs of a product.
void Decoder::norm_rows(Operation& operation, const Norm& norm, float multiplier, std::size_t count) {
  auto norm_row = [&](std::size_t row) {
    norm_of(&residual_[row * hidden_stride_], norm, shape_.hidden_size,
            [&](std::size_t i, f32x16 values) { put_normed(row, i, values * multiplier); });
    normed_.quantize(row, shape_.hidden_size);
  };
  operation.share(count, kRowsPerPiece, norm_row, [this] { lap(Part::norm); });
}

// The same without a norm.
void Decoder::take_rows(Operation& operation, std::size_t count) {
  auto take_row = [&](std::size_t row) {
    const float* from = &residual_[row * hidden_stride_];
    for (int i = 0; i < shape_.hidden_size; i += kLanes) put_normed(row, i, load<f32x16>(from + i));
    normed_.quantize(row, shape_.hidden_size);
  };
  operation.share(count, kRowsPerPiece, take_row, [this] { lap(Part::norm); });
}

void Decoder::add_normed(Operation& operation, const Norm& norm, float multiplier, std::size_t count) {
  auto add_row = [&](std::size_t row) {
    float* to = &residual_[row * hidden_stride_];
    norm_of(&update_[row * hidden_stride_], norm, shape_.hidden_size,
            [&](std::size_t i, f32x16 values) { store(to + i, load<f32x16>(to + i) + values * multiplier); });
  };
  operation.share(count, kRowsPerPiece, add_row, [this] { lap(Part::norm); });
}

// The norm of what a part gave: kept, or added to what was kept.
void Decoder::keep_normed(Operation& operation, const Norm& norm, bool is_added, std::size_t count) {
  auto keep_row = [&](std::size_t row) {
    float *kept = &kept_[row * hidden_stride_], *update = &update_[row * hidden_stride_];
    norm_of(update, norm, shape_.hidden_size, [&](std::size_t i, f32x16 values) {
      is_added ? store(update + i, load<f32x16>(kept + i) + values) : store(kept + i, values);
    });
  };
  operation.share(count, kRowsPerPiece, keep_row, [this] { lap(Part::norm); });
}

void Decoder::scale_rows(Operation& operation, float scale, std::size_t count) {
  auto scale_row = [&](std::size_t row) {
    float* x = &residual_[row * hidden_stride_];
    for (int i = 0; i < shape_.hidden_size; i += kLanes) store(x + i, load<f32x16>(x + i) * scale);
  };
  operation.share(count, kRowsPerPiece, scale_row, [this] { lap(Part::norm); });
}

void Decoder::quantize_rows(Operation& operation, RowBuffer& rows, std::size_t num_inputs, std::size_t count,
                            Part part) {
  if (!rows.is_quantized()) return;
  operation.share(count, 1, [&](std::size_t row) { rows.quantize(row, num_inputs); }, [this, part] { lap(part); });
}

// A matrix times what the heads, the neurons or the layer's inputs gave, added to the residual stream or kept for a
// norm. With peers the first two are a part of the sum. That of what all tokens pass waits for what experts add to it.
void Decoder::multiply_out(Operation* operation, const Instruction& now, int num_rows) {
  const Layer& layer = weights_.layers[now.layer];
  const bool is_output = now.weight == Weight::output, is_added = now.kind == Kind::multiply_add;
  const bool is_down = now.weight == Weight::down;
  const Part part = is_output ? Part::o_proj : is_down ? Part::down_proj : Part::layer_inputs;
  const Matrix& matrix = is_output ? layer.output : is_down ? layer.dense.down : layer.input_up;
  const Aligned<float>& bias = is_output ? layer.output_bias : layer.dense.down_bias;
  const float* scales = !is_down || layer.shared_scale.empty() ? nullptr : shared_scales_.data();
  const float* whole_bias = bias.empty() || !(is_output || is_down) ? nullptr : bias.data();
  const bool is_part = has_peers() && (is_output || is_down), waits = is_down && layer.adds_to_shared();
  const bool is_put_added = is_added && !is_part;
  const float* add = is_part ? nullptr : whole_bias;
  const float multiplier = is_part ? 1.0f : now.multiplier;
  float* whole = is_added ? residual_.data() : update_.data();
  float* out = is_part ? slot() : whole;
  auto put = [=, this](int row, std::size_t panel, f32x16 left, f32x16 right) {
    float* to = out + row * hidden_stride_ + panel * kPanel;
    if (add != nullptr)
      left += load<f32x16>(add + panel * kPanel), right += load<f32x16>(add + panel * kPanel + kLanes);
    if (multiplier != 1.0f) left *= multiplier, right *= multiplier;
    if (scales != nullptr) left *= scales[row], right *= scales[row];
    if (is_put_added) left += load<f32x16>(to), right += load<f32x16>(to + kLanes);
    store(to, left);
    store(to + kLanes, right);
  };
  const Rows rows = (is_output ? attended_ : inner_).rows(num_rows, matrix.num_in);
  multiply_shared(operation[0], team_.size(), matrix, rows, put, [this, part, num_rows, is_met = is_part && !waits] {
    lap(part);
    if (is_met) meet_rows(num_rows);
  });
  if (!is_part || waits) return;
  add_parts(operation[1], num_rows, [=, this, &now](std::size_t row, std::size_t i, f32x16 sum) {
    float* to = whole + row * hidden_stride_ + i;
    if (whole_bias != nullptr) sum += load<f32x16>(whole_bias + i);
    if (now.multiplier != 1.0f) sum *= now.multiplier;
    store(to, is_added ? load<f32x16>(to) + sum : sum);
  });
}

// Gate and up of all rows, or up alone, and the activation.
void Decoder::multiply_neurons(Operation& operation, const Instruction& now, int num_rows) {
  const Neurons& part = weights_.layers[now.layer].dense;
  put_neurons(part, now.activation, inner_, 0, [&](auto&& put) {
    multiply_shared(
        operation, team_.size(), part.gate_up, normed_.rows(num_rows, shape_.hidden_size), put,
        [this] { lap(Part::gate_up_proj); }, part.gate_up.has_gate ? 2 : 1);
  });
}

// Query, key and value of all tokens; a head is finished as soon as its last panel is multiplied.
void Decoder::multiply_heads(Operation& operation, const Step& step, const Instruction& heads) {
  alignas(64) float sums[kBlockRows * kMaxHeadDim];
  const Layer& layer = weights_.layers[heads.layer];
  const KVCache cache = step.kv.layer(heads.layer, heads.num_kv_heads, heads.head_dim);
  const std::size_t panels = layer.head_columns() / kPanel;
  const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
  auto put = [&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    if (bias != nullptr)
      left += load<f32x16>(bias + panel * kPanel), right += load<f32x16>(bias + panel * kPanel + kLanes);
    float* head = sums + row % kBlockRows * panels * kPanel;
    store(head + panel % panels * kPanel, left);
    store(head + panel % panels * kPanel + kLanes, right);
    if (panel % panels == panels - 1) put_head(step, heads, cache, row, static_cast<int>(panel / panels), head);
  };
  const Rows rows = normed_.rows(static_cast<int>(step.num_tokens), shape_.hidden_size);
  multiply_shared(operation, team_.size(), layer.qkv, rows, put, [this] { lap(Part::qkv_proj); }, panels);
}

// One head of one token, counted through queries, keys and values: what attention needs of it. Queries and keys that
// have a norm of all heads together wait for it.
void Decoder::put_head(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token, int head,
                       float* sums) {
  const int key_head = head - heads.num_heads, value_head = key_head - heads.num_kv_heads;
  const int gate = value_head - heads.num_value_heads;
  if (gate >= 0) {
    std::copy_n(sums, heads.head_dim, &gates_[token * gate_stride_ + gate * heads.head_dim]);
    return;
  }
  if (value_head >= 0) return store_value(step, heads, cache, token, value_head, sums);
  if (key_head >= 0 && heads.num_value_heads == 0) store_value(step, heads, cache, token, key_head, sums);
  if (is_whole(heads)) {
    std::copy_n(sums, heads.head_dim, &raw_heads_[token * raw_stride_ + head * heads.head_dim]);
    return;
  }
  const Layer& layer = weights_.layers[heads.layer];
  const Norm& norm = head < heads.num_heads ? layer.query_norm : layer.key_norm;
  turn_and_store(step, heads, cache, token, head, sums, heads.qk_norm == QkNorm::head ? &norm : nullptr);
}

void Decoder::store_value(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token, int head,
                          const float* sums) const {
  const StepRow& row = step.rows[token_rows_[token]];
  const int position = row.start + static_cast<int>(token) - step.first_token[token_rows_[token]];
  if (!shards_.has(position, row.first_shard)) return;
  const int place = shards_.own(position, row.first_shard);
  const int block = row.blocks[place / cache.block_size], slot = place % cache.block_size;
  if (!heads.has_value_norm) return cache.put_value(block, head, slot, sums);
  alignas(64) float normed[kMaxHeadDim];
  const float scale = inverse_rms(sums, heads.head_dim, shape_.eps);
  for (int d = 0; d < heads.head_dim; d += kLanes) store(normed + d, load<f32x16>(sums + d) * scale);
  cache.put_value(block, head, slot, normed);
}

void Decoder::norm_raw_heads(Operation& operation, const Step& step, const Instruction& heads) {
  if (!is_whole(heads)) return;
  const Layer& layer = weights_.layers[heads.layer];
  const KVCache cache = step.kv.layer(heads.layer, heads.num_kv_heads, heads.head_dim);
  auto norm_token = [&](std::size_t token) {
    float *queries = &raw_heads_[token * raw_stride_], *keys = queries + query_size(heads);
    auto norm_all = [](float* x, const Norm& norm) {
      norm_of(x, norm, norm.weight.size(), [x](std::size_t i, f32x16 values) { store(x + i, values); });
    };
    norm_all(queries, layer.query_norm);
    norm_all(keys, layer.key_norm);
    for (int head = 0; head < heads.num_heads + heads.num_kv_heads; head++) {
      turn_and_store(step, heads, cache, token, head, queries + head * heads.head_dim, nullptr);
    }
  };
  operation.share(step.num_tokens, 1, norm_token, [this] { lap(Part::qkv_proj); });
}

void Decoder::turn_and_store(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token,
                             int head, float* sums, const Norm* norm) {
  const int dim = heads.head_dim, row = token_rows_[token];
  const int position = step.rows[row].start + static_cast<int>(token) - step.first_token[row];
  const int key_head = head - heads.num_heads;
  Rotation rotation{nullptr, nullptr, 0, 0, false};
  if (heads.rope >= 0) {
    const std::size_t size = heads.is_interleaved ? 2 * heads.num_turned : heads.num_turned, angles = position * size;
    rotation = {cosines_[heads.rope] + angles, sines_[heads.rope] + angles, heads.rotary_dim, heads.num_turned,
                heads.is_interleaved != 0};
  }
  if (norm != nullptr && !norm->bias.empty()) {
    norm_of(sums, *norm, dim, [sums](std::size_t i, f32x16 values) { store(sums + i, values); });
    norm = nullptr;
  }
  turn_head(sums, dim, norm, rotation);
  if (key_head >= 0) {
    const int first_shard = step.rows[row].first_shard;
    if (!shards_.has(position, first_shard)) return;
    const int place = shards_.own(position, first_shard);
    return cache.put_key(step.rows[row].blocks[place / cache.block_size], key_head, place % cache.block_size, sums);
  }
  float scale = kLog2E / heads.score_divisor;
  if (heads.query_scaling_beta != 0) {
    scale *= 1.0f + heads.query_scaling_beta * std::log1p(static_cast<float>(position / heads.positions_per_scale));
  }
  bf16* query = reinterpret_cast<bf16*>(&queries_[token * query_stride_ + head * dim / 2]);
  for (int d = 0; d < dim; d += kLanes) store_bf16(query + d, load<f32x16>(sums + d) * scale);
}

EVENTLM_INLINE void Decoder::put_attended(std::size_t token, std::size_t input, f32x16 values, bool is_gated) {
  if (is_gated) values *= sigmoid(load<f32x16>(&gates_[token * gate_stride_ + input]));
  attended_.put(token, input, values);
}

StepQueries Decoder::queries_of(const Step& step, const Instruction& now) {
  const Aligned<float>& sinks = weights_.layers[now.layer].sinks;
  return {plan_of(now),
          step.rows,
          step.first_token,
          step.kv.layer(now.layer, now.num_kv_heads, now.head_dim),
          queries_.data(),
          query_stride_,
          now.soft_cap * kLog2E,
          sinks.empty() ? nullptr : sinks.data(),
          partials_.data(),
          shards_,
          step.num_shared > 0 ? reinterpret_cast<float*>(sharers_.meeting->mine()) : nullptr};
}

void Decoder::attend_all(Operation* operation, const Step& step, const Instruction& now) {
  const StepQueries queries = queries_of(step, now);
  auto put = [this, &now](std::size_t token, int head, int d, f32x16 values) {
    put_attended(token, static_cast<std::size_t>(head) * now.head_dim + d, values, now.has_output_gate);
  };
  const bool is_split = queries.plan.num_partials > 0;
  attend_shared(operation[0], queries, put, [this, &step, &now, is_split] {
    lap(Part::attention);
    if (!is_split) meet_sharers(now, step.num_shared);
  });
  combine_shared(operation[1], queries, put, [this, &step, &now] {
    lap(Part::attention);
    meet_sharers(now, step.num_shared);
  });
  if (step.num_shared == 0) return;
  auto part = [this](int member) { return reinterpret_cast<const float*>(sharers_.meeting->part(member)); };
  auto merge_token = [&](std::size_t token) {
    const std::int32_t row = token_rows_[token];
    if (step.rows[row].is_shared()) merge_shared(queries, row, token, part, put);
  };
  operation[3].share(step.num_tokens, kRowsPerPiece, merge_token, [this] { lap(Part::attention); });
}

}  // namespace eventlm
