// Attention of a step, layer by layer, for models whose other operations torch computes: it stores the keys and values
// that each call brings, and attends to all that the sequences have.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_passes.h"
#include "attention_plan.h"
#include "kv_cache.h"
#include "products.h"
#include "team.h"

namespace eventlm {

// What the calls of a layer have in common. Python fills it.
struct LayerAttention {
  std::int32_t num_heads, num_kv_heads;
  // Elements of queries and keys, of values, and of both in the cache, where zeros follow those of the smaller.
  std::int32_t key_size, value_size, head_dim;
  std::int32_t window;  // tokens that a query sees; 0: all before it
};

class PagedAttention {
 public:
  // The team must live as long.
  explicit PagedAttention(Team& team) : team_(team) {}

  // The rows of the calls that follow, whose tokens lie one row after the other. Block tables must stay where they are.
  void begin(std::vector<StepRow> rows);

  // out: [tokens, num_heads, value_size]. scale: of the products of queries and keys. soft_cap: 0 if there is none.
  // sinks: of each head; null: none.
  void attend(const LayerAttention& layer, const KVCache& cache, const Heads& queries, const Heads& keys,
              const Heads& values, float scale, float soft_cap, const float* sinks, bf16* out);

 private:
  struct Planned {
    AttentionPlan plan;
    bool is_made = false;
  };

  const AttentionPlan& plan_of(const LayerAttention& layer);

  Team& team_;
  const ContextShards shards_;  // it has all
  std::vector<StepRow> rows_;
  std::vector<std::int32_t> first_tokens_, token_rows_;
  std::vector<Planned> plans_;  // of each window and shape of heads
  Aligned<std::uint32_t> queries_;
  Aligned<float> partials_;
};

}  // namespace eventlm
