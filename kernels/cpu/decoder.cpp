#include "decoder.h"

#include "pointwise.h"

namespace eventlm {

namespace {

// Those of run_layer.
constexpr int kOperationsPerLayer = 10;
// Context that one pass of a decode goes over: longer ones are split so that several threads share them. Fixed, so that
// a result does not depend on who else is in the step.
constexpr int kContextPerPass = 1024;
// A member takes several passes of attention at a time: a share of all that they cost, and at most so many.
constexpr int kPiecesPerMember = 4;
constexpr std::size_t kMostPasses = 8;
constexpr float kLog2E = 1.44269504f;

}  // namespace

struct Decoder::Step {
  const std::int32_t* token_ids;
  const std::vector<StepRow>& rows;
  const KVStorage& kv;
  std::size_t num_tokens;
  std::vector<std::int32_t> first_token;  // of each row
};

Decoder::Decoder(const Shape& shape, const float* cosines, const float* sines, bool is_int8, int num_threads)
    : shape_(shape),
      cosines_(cosines, cosines + static_cast<std::size_t>(shape.max_positions) * shape.head_dim / 2),
      sines_(sines, sines + static_cast<std::size_t>(shape.max_positions) * shape.head_dim / 2),
      team_(num_threads),
      weights_(shape, is_int8),
      hidden_stride_(round_up(shape.hidden_size, kPanel) + kLanes),
      query_stride_(round_up(static_cast<std::size_t>(shape.num_heads) * shape.head_dim / 2, kLanes) + kLanes),
      normed_(shape.hidden_size, is_int8),
      attended_(static_cast<std::size_t>(shape.num_heads) * shape.head_dim, is_int8),
      inner_(shape.intermediate_size, is_int8),
      operations_(1 + shape.num_layers * kOperationsPerLayer) {}

void Decoder::reserve(std::size_t num_tokens) {
  grow(residual_, num_tokens * hidden_stride_);
  grow(queries_, num_tokens * query_stride_);
  normed_.reserve(num_tokens);
  attended_.reserve(num_tokens);
  inner_.reserve(num_tokens);
}

// Decodes go over their context in passes of a fixed length, prompts in tiles of queries.
void Decoder::plan_attention(const std::vector<StepRow>& rows) {
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const int queries_at_once = std::max(1, most_query_rows(shape_.head_dim) / group);
  items_.clear();
  first_partials_.assign(rows.size(), -1);
  std::int32_t num_partials = 0;
  for (std::size_t number = 0; number < rows.size(); number++) {
    const StepRow& row = rows[number];
    const auto at = static_cast<std::int32_t>(number);
    if (row.num_tokens == 1) {
      const int length = row.start + 1;
      const bool is_split = length > kContextPerPass;
      if (is_split) first_partials_[number] = num_partials;
      for (int begin = 0; begin < length; begin += kContextPerPass) {
        items_.push_back({at, 0, 1, begin, std::min(begin + kContextPerPass, length), is_split ? num_partials++ : -1});
      }
      continue;
    }
    for (int first = 0; first < row.num_tokens; first += queries_at_once) {
      const int count = std::min(queries_at_once, row.num_tokens - first);
      items_.push_back({at, first, count, 0, row.start + first + count, -1});
    }
  }
  grow(partials_, static_cast<std::size_t>(num_partials) * shape_.num_heads * (shape_.head_dim + 2));
  divide_attention();
}

// Puts the longest passes first, so that the threads end together, and divides all into pieces.
void Decoder::divide_attention() {
  const std::size_t num_heads = shape_.num_kv_heads, num_passes = items_.size() * num_heads;
  auto cost = [](const Item& item) { return static_cast<std::int64_t>(item.num_queries) * (item.end - item.begin); };
  std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  std::int64_t all = 0, taken = 0;
  for (const Item& item : items_) all += cost(item) * shape_.num_kv_heads;
  const std::int64_t most = all / (kPiecesPerMember * team_.size());
  first_passes_ = {0};
  for (std::size_t pass = 1; pass < num_passes; pass++) {
    taken += cost(items_[(pass - 1) / num_heads]);
    const bool is_full = taken + cost(items_[pass / num_heads]) > most;
    if (is_full || pass - first_passes_.back() == kMostPasses) first_passes_.push_back(pass), taken = 0;
  }
  first_passes_.push_back(num_passes);
}

void Decoder::lap(Part part) {
  const std::int64_t now = now_ns();
  times_[static_cast<int>(part)] += now - last_ns_;
  last_ns_ = now;
}

void Decoder::forward(const std::int32_t* token_ids, const std::vector<StepRow>& rows, const KVStorage& kv,
                      float* hidden) {
  Step step{token_ids, rows, kv, 0, {}};
  token_rows_.clear();
  for (std::size_t row = 0; row < rows.size(); row++) {
    step.first_token.push_back(static_cast<std::int32_t>(step.num_tokens));
    step.num_tokens += rows[row].num_tokens;
    token_rows_.insert(token_rows_.end(), rows[row].num_tokens, static_cast<std::int32_t>(row));
  }
  reserve(step.num_tokens);
  plan_attention(rows);
  for (Operation& operation : operations_) operation.reset();
  last_ns_ = now_ns();
  team_.run([&] { run_layers(step); });
  for (std::size_t token = 0; token < step.num_tokens; token++) {
    std::copy_n(&residual_[token * hidden_stride_], shape_.hidden_size, hidden + token * shape_.hidden_size);
  }
}

void Decoder::run_layers(Step& step) {
  const std::size_t size = shape_.hidden_size;
  auto embed = [&](std::size_t token) {
    float* to = &residual_[token * hidden_stride_];
    if (weights_.embedding == nullptr) return weights_.lm_head.unpack(step.token_ids[token], to);
    const bf16* from = weights_.embedding + step.token_ids[token] * size;
    for (std::size_t i = 0; i < size; i++) to[i] = to_float(from[i]);
  };
  operations_[0].share(step.num_tokens, kRowsPerPiece, embed, [this] { lap(Part::embed); });
  for (int number = 0; number < shape_.num_layers; number++) run_layer(step, number);
}

// Returns with all rows of the residual stream normed, as inputs of a product.
void Decoder::norm_rows(Operation& operation, const Aligned<float>& weight, std::size_t count) {
  auto norm_row = [&](std::size_t row) {
    rms_norm(&residual_[row * hidden_stride_], weight.data(), shape_.hidden_size, shape_.eps, normed_, row);
    normed_.quantize(row);
  };
  operation.share(count, kRowsPerPiece, norm_row, [this] { lap(Part::norm); });
}

void Decoder::quantize_rows(Operation& operation, RowBuffer& rows, std::size_t count, Part part) {
  if (!rows.is_int8()) return;
  operation.share(count, 1, [&](std::size_t row) { rows.quantize(row); }, [this, part] { lap(part); });
}

// A matrix times `rows`, added to the residual stream.
void Decoder::multiply_add(Operation& operation, const Matrix& matrix, const Rows& rows, const Aligned<float>& bias,
                           Part part) {
  const float* add = bias.empty() ? nullptr : bias.data();
  auto put = [this, add](int row, std::size_t panel, f32x16 left, f32x16 right) {
    float* to = &residual_[row * hidden_stride_ + panel * kPanel];
    if (add != nullptr)
      left += load<f32x16>(add + panel * kPanel), right += load<f32x16>(add + panel * kPanel + kLanes);
    store(to, load<f32x16>(to) + left);
    store(to + kLanes, load<f32x16>(to + kLanes) + right);
  };
  multiply_shared(operation, team_.size(), matrix, rows, put, [this, part] { lap(part); });
}

void Decoder::run_layer(Step& step, int number) {
  Operation* operation = &operations_[1 + static_cast<std::size_t>(number) * kOperationsPerLayer];
  // A thread that comes late passes over what is done.
  if (operation[kOperationsPerLayer - 1].is_done()) return;
  const Layer& layer = weights_.layers[number];
  const std::size_t count = step.num_tokens;
  const int num_rows = static_cast<int>(count);
  const KVCache cache = step.kv.layer(number, shape_.num_kv_heads, shape_.head_dim);

  norm_rows(*operation++, layer.input_norm, count);
  multiply_heads(*operation++, step, layer, cache);
  attend_all(*operation++, step, cache);
  combine_all(*operation++, step);
  quantize_rows(*operation++, attended_, count, Part::attention);
  multiply_add(*operation++, layer.output, attended_.rows(num_rows), layer.output_bias, Part::o_proj);
  norm_rows(*operation++, layer.post_attention_norm, count);
  multiply_gate_up(*operation++, layer, num_rows);
  quantize_rows(*operation++, inner_, count, Part::gate_up_proj);
  multiply_add(*operation++, layer.down, inner_.rows(num_rows), layer.down_bias, Part::down_proj);
}

// Gate and up of all rows, and the activation of both.
void Decoder::multiply_gate_up(Operation& operation, const Layer& layer, int num_rows) {
  const float* bias = layer.gate_up_bias.empty() ? nullptr : layer.gate_up_bias.data();
  auto put = [this, bias](int row, std::size_t panel, f32x16 gate, f32x16 up) {
    if (bias != nullptr)
      gate += load<f32x16>(bias + panel * kPanel), up += load<f32x16>(bias + panel * kPanel + kLanes);
    inner_.put(row, panel * kLanes, silu(gate) * up);
  };
  multiply_shared(operation, team_.size(), layer.gate_up, normed_.rows(num_rows), put,
                  [this] { lap(Part::gate_up_proj); });
}

// Query, key and value of all tokens; a head is finished as soon as its last panel is multiplied.
void Decoder::multiply_heads(Operation& operation, const Step& step, const Layer& layer, const KVCache& cache) {
  alignas(64) float heads[kBlockRows * kMaxHeadDim];
  const std::size_t panels = round_up(shape_.head_dim, kPanel) / kPanel;
  const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
  auto put = [&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    if (bias != nullptr)
      left += load<f32x16>(bias + panel * kPanel), right += load<f32x16>(bias + panel * kPanel + kLanes);
    float* head = heads + row % kBlockRows * panels * kPanel;
    store(head + panel % panels * kPanel, left);
    store(head + panel % panels * kPanel + kLanes, right);
    if (panel % panels == panels - 1) put_head(step, layer, cache, row, static_cast<int>(panel / panels), head);
  };
  multiply_shared(
      operation, team_.size(), layer.qkv, normed_.rows(static_cast<int>(step.num_tokens)), put,
      [this] { lap(Part::qkv_proj); }, panels);
}

// One head of one token, counted through queries, keys and values: what attention needs of it.
void Decoder::put_head(const Step& step, const Layer& layer, const KVCache& cache, std::size_t token, int head,
                       float* sums) {
  const int dim = shape_.head_dim, row = token_rows_[token];
  const int position = step.rows[row].start + static_cast<int>(token) - step.first_token[row];
  const int key_head = head - shape_.num_heads, value_head = key_head - shape_.num_kv_heads;
  const int block = step.rows[row].blocks[position / cache.block_size], slot = position % cache.block_size;
  if (value_head >= 0) return cache.put_value(block, value_head, slot, sums);
  const Aligned<float>& norm = key_head >= 0 ? layer.key_norm : layer.query_norm;
  const std::size_t angles = static_cast<std::size_t>(position) * dim / 2;
  turn_head(sums, dim, norm.empty() ? nullptr : norm.data(), shape_.eps, &cosines_[angles], &sines_[angles]);
  if (key_head >= 0) return cache.put_key(block, key_head, slot, sums);
  const float scale = kLog2E / std::sqrt(static_cast<float>(dim));
  bf16* query = reinterpret_cast<bf16*>(&queries_[token * query_stride_ + head * dim / 2]);
  for (int d = 0; d < dim; d += kLanes) store_bf16(query + d, load<f32x16>(sums + d) * scale);
}

// Passes that a thread takes together ask for the memory of the next before one ends.
void Decoder::attend_all(Operation& operation, const Step& step, const KVCache& cache) {
  AttentionState state;
  const std::size_t num_heads = shape_.num_kv_heads;
  auto context = [&](std::size_t pass) {
    const Item& item = items_[pass / num_heads];
    return ContextRange{step.rows[item.row].blocks, static_cast<int>(pass % num_heads), item.begin, item.end};
  };
  auto attend_some = [&](std::size_t piece) {
    const std::size_t end = first_passes_[piece + 1];
    for (std::size_t pass = first_passes_[piece]; pass < end; pass++) {
      const ContextRange following = pass + 1 < end ? context(pass + 1) : ContextRange{};
      attend_item(step, cache, items_[pass / num_heads], context(pass), following, state);
    }
  };
  operation.share(first_passes_.size() - 1, 1, attend_some, [this] { lap(Part::attention); });
}

void Decoder::attend_item(const Step& step, const KVCache& cache, const Item& item, const ContextRange& context,
                          const ContextRange& following, AttentionState& state) {
  const int group = shape_.num_heads / shape_.num_kv_heads, dim = shape_.head_dim, head = context.head;
  const StepRow& row = step.rows[item.row];
  AttentionTile tile{context};
  tile.num_rows = item.num_queries * group;
  const std::size_t first_token = step.first_token[item.row] + item.first_query;
  for (int i = 0; i < tile.num_rows; i++) {
    const std::size_t token = first_token + i / group;
    tile.queries[i] = &queries_[token * query_stride_ + (head * group + i % group) * dim / 2];
    tile.limit[i] = row.start + item.first_query + i / group + 1;
  }
  attend(cache, tile, following, state);
  for (int i = 0; i < tile.num_rows; i++) {
    const float* from = state.output + i * dim;
    const float sum = sum_of(state.rows[i].sum);
    const int query_head = head * group + i % group;
    if (item.partial >= 0) {
      float* to = &partials_[(static_cast<std::size_t>(item.partial) * shape_.num_heads + query_head) * (dim + 2)];
      to[0] = state.rows[i].maximum;
      to[1] = sum;
      std::copy_n(from, dim, to + 2);
      continue;
    }
    for (int d = 0; d < dim; d += kLanes) {
      attended_.put(first_token + i / group, query_head * dim + d, load<f32x16>(from + d) / sum);
    }
  }
}

void Decoder::combine_all(Operation& operation, const Step& step) {
  if (std::none_of(first_partials_.begin(), first_partials_.end(), [](std::int32_t first) { return first >= 0; }))
    return;
  const std::size_t num_heads = shape_.num_heads;
  auto combine_one = [&](std::size_t i) { combine(step, i / num_heads, static_cast<int>(i % num_heads)); };
  operation.share(step.rows.size() * num_heads, num_heads / shape_.num_kv_heads, combine_one,
                  [this] { lap(Part::attention); });
}

// Passes over parts of one context, put together in their order.
void Decoder::combine(const Step& step, std::size_t row, int head) {
  if (first_partials_[row] < 0) return;
  const int dim = shape_.head_dim, num_parts = (step.rows[row].start + kContextPerPass) / kContextPerPass;
  auto part = [&](int number) {
    return &partials_[(static_cast<std::size_t>(first_partials_[row] + number) * shape_.num_heads + head) * (dim + 2)];
  };
  float maximum = -INFINITY, sum = 0;
  for (int number = 0; number < num_parts; number++) maximum = std::max(maximum, part(number)[0]);
  alignas(64) float output[kMaxHeadDim] = {};
  for (int number = 0; number < num_parts; number++) {
    const float scale = exp2_of(splat(part(number)[0] - maximum))[0];
    sum += part(number)[1] * scale;
    for (int d = 0; d < dim; d++) output[d] += part(number)[2 + d] * scale;
  }
  for (int d = 0; d < dim; d += kLanes) {
    attended_.put(step.first_token[row], head * dim + d, load<f32x16>(output + d) / sum);
  }
}

}  // namespace eventlm
