// The passes of a plan over one layer's keys and values, shared out among a team.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "team.h"

namespace eventlm {

// The queries of a step's tokens, and what they attend to in one layer.
struct StepQueries {
  const AttentionPlan& plan;
  const std::vector<StepRow>& rows;
  const std::vector<std::int32_t>& first_tokens;  // of each row
  KVCache cache;
  const std::uint32_t* words;  // [tokens][query_stride], of each head [head_dim / 2]; scaled, see AttentionTile
  std::size_t stride;
  float soft_cap;      // of scores times log2(e); 0: none
  const float* sinks;  // of each head; null: none
  float* partials;     // of the plan's, [num_heads][head_dim + 2] each: maximum, sum and output
  const ContextShards& shards;
  float* shared;  // of the tokens of shared rows, as partials: of what this member has of their contexts

  float* partial(std::int32_t number, int head) const { return partials + before(number, head); }
  float* shared_part(std::int32_t token, int head) const { return shared + before(token, head); }
  // Numbers of partials before that of a head.
  std::size_t before(std::size_t number, int head) const {
    return (number * plan.num_heads + head) * (plan.head_dim + 2);
  }
};

// Parts of one context, put together in their order.
struct Combined {
  float maximum = -INFINITY, sum = 0;
  alignas(64) float output[kMaxHeadDim] = {};

  // part(i): of each of them maximum, sum and output.
  template <class Part>
  Combined(int num_parts, int dim, Part&& part) {
    for (int i = 0; i < num_parts; i++) maximum = std::max(maximum, part(i)[0]);
    for (int i = 0; i < num_parts; i++) {
      const float* from = part(i);
      const float scale = exp2_of(splat(from[0] - maximum))[0];
      sum += from[1] * scale;
      for (int d = 0; d < dim; d++) output[d] += from[2 + d] * scale;
    }
  }

  // Calls put(d, 16 values from d on).
  template <class Put>
  void put(int dim, Put&& put) const {
    for (int d = 0; d < dim; d += kLanes) put(d, load<f32x16>(output + d) / sum);
  }
};

inline void put_part(float maximum, float sum, const float* output, int dim, float* to) {
  to[0] = maximum;
  to[1] = sum;
  std::copy_n(output, dim, to + 2);
}

// Calls put(token, head, d, 16 values from d on).
template <class Put>
void attend_item(const StepQueries& step, const AttentionItem& item, const ContextRange& context,
                 const ContextRange& following, AttentionState& state, Put&& put) {
  const AttentionPlan& plan = step.plan;
  const int group = plan.num_heads / plan.num_kv_heads, dim = plan.head_dim, head = context.head;
  AttentionTile tile{context};
  tile.num_rows = item.num_queries * group;
  tile.soft_cap = step.soft_cap;
  const StepRow& row = step.rows[item.row];
  // A context has them once.
  tile.sinks = step.sinks != nullptr && item.is_first && row.first_shard == 0 ? step.sinks + head * group : nullptr;
  tile.group = group;
  const std::size_t first_token = step.first_tokens[item.row] + item.first_query;
  for (int i = 0; i < tile.num_rows; i++) {
    const std::size_t token = first_token + i / group;
    tile.queries[i] = step.words + token * step.stride + (head * group + i % group) * dim / 2;
    const int limit = row.start + item.first_query + i / group + 1;
    tile.limit[i] = step.shards.own(limit, row.first_shard);
    tile.first[i] = step.shards.own(first_visible(limit, plan.window), row.first_shard);
  }
  attend(step.cache, tile, following, state);
  for (int i = 0; i < tile.num_rows; i++) {
    const float* from = state.output + i * dim;
    const float sum = sum_of(state.rows[i].sum);
    const int query_head = head * group + i % group;
    if (item.partial >= 0 || row.is_shared()) {
      float* to = item.partial >= 0 ? step.partial(item.partial, query_head)
                                    : step.shared_part(row.first_shared + item.first_query + i / group, query_head);
      put_part(state.rows[i].maximum, sum, from, dim, to);
      continue;
    }
    for (int d = 0; d < dim; d += kLanes) put(first_token + i / group, query_head, d, load<f32x16>(from + d) / sum);
  }
}

// Of contexts that take one pass and that this member has whole; the others leave their parts. Passes that a thread
// takes together ask for the memory of the next before one ends.
template <class Put, class Finish>
void attend_shared(Operation& operation, const StepQueries& step, Put&& put, Finish&& finish) {
  AttentionState state;
  const AttentionPlan& plan = step.plan;
  const std::size_t num_heads = plan.num_kv_heads;
  auto context = [&](std::size_t pass) {
    const AttentionItem& item = plan.items[pass / num_heads];
    return ContextRange{step.rows[item.row].blocks, static_cast<int>(pass % num_heads), item.begin, item.end};
  };
  auto attend_some = [&](std::size_t piece) {
    const std::size_t end = plan.first_passes[piece + 1];
    for (std::size_t pass = plan.first_passes[piece]; pass < end; pass++) {
      const ContextRange following = pass + 1 < end ? context(pass + 1) : ContextRange{};
      attend_item(step, plan.items[pass / num_heads], context(pass), following, state, put);
    }
  };
  operation.share(plan.first_passes.size() - 1, 1, attend_some, finish);
}

// Of contexts that take several passes, which must be over. Shared ones leave what comes of it.
template <class Put, class Finish>
void combine_shared(Operation& operation, const StepQueries& step, Put&& put, Finish&& finish) {
  const AttentionPlan& plan = step.plan;
  if (plan.num_partials == 0) return;
  const std::size_t num_heads = plan.num_heads;
  const int dim = plan.head_dim;
  auto combine_one = [&](std::size_t i) {
    const std::size_t row = i / num_heads, token = step.first_tokens[row];
    const int head = static_cast<int>(i % num_heads);
    const AttentionSplit& split = plan.splits[row];
    if (split.num_partials == 0) return;
    const Combined all(split.num_partials, dim,
                       [&](int part) { return step.partial(split.first_partial + part, head); });
    if (step.rows[row].is_shared()) {
      float* to = step.shared_part(step.rows[row].first_shared, head);
      return put_part(all.maximum, all.sum, all.output, dim, to);
    }
    all.put(dim, [&](int d, f32x16 values) { put(token, head, d, values); });
  };
  operation.share(step.rows.size() * num_heads, num_heads / plan.num_kv_heads, combine_one, finish);
}

// One token of a shared row: what its holders have left, put together in the order of their first shards, so that all
// get the same. part(member): what that one has as StepQueries::shared.
template <class Part, class Put>
void merge_shared(const StepQueries& step, std::size_t row_number, std::size_t token, Part&& part, Put&& put) {
  const StepRow& row = step.rows[row_number];
  const int dim = step.plan.head_dim, num_holders = step.shards.num_holders(row.start + row.num_tokens);
  const std::size_t number = row.first_shared + token - step.first_tokens[row_number];
  for (int head = 0; head < step.plan.num_heads; head++) {
    const Combined all(num_holders, dim,
                       [&](int i) { return part(step.shards.holder(i, row.first_shard)) + step.before(number, head); });
    all.put(dim, [&](int d, f32x16 values) { put(token, head, d, values); });
  }
}

}  // namespace eventlm
