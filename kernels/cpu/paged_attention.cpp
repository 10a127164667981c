#include "paged_attention.h"

#include <algorithm>
#include <utility>

#include "rows.h"

namespace eventlm {

namespace {

// Tokens whose queries, keys and values a member takes.
constexpr std::size_t kTokensAtOnce = 2;

// A head's elements times `scale`, and zeros up to `dim`.
void widen(const bf16* from, int size, int dim, float scale, float* to) {
  int d = 0;
  for (; d + kLanes <= size; d += kLanes) store(to + d, load_bf16(from + d) * scale);
  for (; d < size; d++) to[d] = to_float(from[d]) * scale;
  std::fill(to + d, to + dim, 0.0f);
}

}  // namespace

void PagedAttention::begin(std::vector<StepRow> rows) {
  rows_ = std::move(rows);
  first_tokens_.clear();
  token_rows_.clear();
  for (std::size_t row = 0; row < rows_.size(); row++) {
    first_tokens_.push_back(static_cast<std::int32_t>(token_rows_.size()));
    token_rows_.insert(token_rows_.end(), rows_[row].num_tokens, static_cast<std::int32_t>(row));
  }
  for (Planned& each : plans_) each.is_made = false;
}

const AttentionPlan& PagedAttention::plan_of(const LayerAttention& layer) {
  Instruction now = {};
  now.num_heads = layer.num_heads, now.num_kv_heads = layer.num_kv_heads, now.head_dim = layer.head_dim;
  now.window = layer.window;
  auto found = std::find_if(plans_.begin(), plans_.end(), [&](const Planned& each) { return each.plan.is_for(now); });
  if (found == plans_.end()) {
    plans_.push_back({AttentionPlan(now)});
    found = plans_.end() - 1;
  }
  if (!found->is_made) {
    found->plan.make(rows_, shards_, team_.size());
    found->is_made = true;
  }
  return found->plan;
}

void PagedAttention::attend(const LayerAttention& layer, const KVCache& cache, const Heads& queries, const Heads& keys,
                            const Heads& values, float scale, float soft_cap, const float* sinks, bf16* out) {
  const AttentionPlan& plan = plan_of(layer);
  const int num_heads = layer.num_heads, dim = layer.head_dim, value_size = layer.value_size;
  // A line more, so that tokens do not lie a power of two apart.
  const std::size_t num_tokens = token_rows_.size(), stride = round_up(num_heads * dim / 2, kLanes) + kLanes;
  if (queries_.size() < num_tokens * stride) queries_.resize(num_tokens * stride);
  const std::size_t partials_size = static_cast<std::size_t>(plan.num_partials) * num_heads * (dim + 2);
  if (partials_.size() < partials_size) partials_.resize(partials_size);
  const StepQueries step{
      plan,    rows_,  first_tokens_, cache, queries_.data(), stride, soft_cap * kLog2E, sinks, partials_.data(),
      shards_, nullptr};

  auto take_token = [&](std::size_t token) {
    alignas(64) float floats[kMaxHeadDim];
    const StepRow& row = rows_[token_rows_[token]];
    const int position = row.start + static_cast<int>(token) - first_tokens_[token_rows_[token]];
    const int block = row.blocks[position / cache.block_size], slot = position % cache.block_size;
    for (int head = 0; head < num_heads; head++) {
      widen(queries.at(token, head), layer.key_size, dim, scale * kLog2E, floats);
      bf16* to = reinterpret_cast<bf16*>(&queries_[token * stride + head * dim / 2]);
      for (int d = 0; d < dim; d += kLanes) store_bf16(to + d, load<f32x16>(floats + d));
    }
    for (int head = 0; head < layer.num_kv_heads; head++) {
      widen(keys.at(token, head), layer.key_size, dim, 1.0f, floats);
      cache.put_key(block, head, slot, floats);
      widen(values.at(token, head), value_size, dim, 1.0f, floats);
      cache.put_value(block, head, slot, floats);
    }
  };
  auto put = [&](std::size_t token, int head, int d, f32x16 attended) {
    bf16* to = out + (token * num_heads + head) * value_size + d;
    if (d + kLanes <= value_size) return store_bf16(to, attended);
    bf16 some[kLanes];
    store_bf16(some, attended);
    if (d < value_size) std::copy_n(some, value_size - d, to);
  };
  Operation taking, attending, combining;
  team_.run([&] {
    taking.share(num_tokens, kTokensAtOnce, take_token);
    attend_shared(attending, step, put, [] {});
    combine_shared(combining, step, put, [] {});
  });
}

}  // namespace eventlm
