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

  float* partial(std::int32_t number, int head) const {
    const std::size_t before = static_cast<std::size_t>(number) * plan.num_heads + head;
    return partials + before * (plan.head_dim + 2);
  }
};

// Calls put(token, head, d, 16 values from d on).
template <class Put>
void attend_item(const StepQueries& step, const AttentionItem& item, const ContextRange& context,
                 const ContextRange& following, AttentionState& state, Put&& put) {
  const AttentionPlan& plan = step.plan;
  const int group = plan.num_heads / plan.num_kv_heads, dim = plan.head_dim, head = context.head;
  AttentionTile tile{context};
  tile.num_rows = item.num_queries * group;
  tile.soft_cap = step.soft_cap;
  // A context has them once.
  tile.sinks = step.sinks != nullptr && item.is_first ? step.sinks + head * group : nullptr;
  tile.group = group;
  const std::size_t first_token = step.first_tokens[item.row] + item.first_query;
  for (int i = 0; i < tile.num_rows; i++) {
    const std::size_t token = first_token + i / group;
    tile.queries[i] = step.words + token * step.stride + (head * group + i % group) * dim / 2;
    tile.limit[i] = step.rows[item.row].start + item.first_query + i / group + 1;
    tile.first[i] = first_visible(tile.limit[i], plan.window);
  }
  attend(step.cache, tile, following, state);
  for (int i = 0; i < tile.num_rows; i++) {
    const float* from = state.output + i * dim;
    const float sum = sum_of(state.rows[i].sum);
    const int query_head = head * group + i % group;
    if (item.partial >= 0) {
      float* to = step.partial(item.partial, query_head);
      to[0] = state.rows[i].maximum;
      to[1] = sum;
      std::copy_n(from, dim, to + 2);
      continue;
    }
    for (int d = 0; d < dim; d += kLanes) put(first_token + i / group, query_head, d, load<f32x16>(from + d) / sum);
  }
}

// Of contexts that take one pass; the others leave their parts. Passes that a thread takes together ask for the memory
// of the next before one ends.
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

// Passes over parts of one context, put together in their order.
template <class Put>
void combine_parts(const StepQueries& step, const AttentionSplit& split, std::size_t token, int head, Put&& put) {
  const int dim = step.plan.head_dim;
  float maximum = -INFINITY, sum = 0;
  for (int part = 0; part < split.num_partials; part++) {
    maximum = std::max(maximum, step.partial(split.first_partial + part, head)[0]);
  }
  alignas(64) float output[kMaxHeadDim] = {};
  for (int part = 0; part < split.num_partials; part++) {
    const float* from = step.partial(split.first_partial + part, head);
    const float scale = exp2_of(splat(from[0] - maximum))[0];
    sum += from[1] * scale;
    for (int d = 0; d < dim; d++) output[d] += from[2 + d] * scale;
  }
  for (int d = 0; d < dim; d += kLanes) put(token, head, d, load<f32x16>(output + d) / sum);
}

template <class Put, class Finish>
void combine_shared(Operation& operation, const StepQueries& step, Put&& put, Finish&& finish) {
  const AttentionPlan& plan = step.plan;
  if (plan.num_partials == 0) return;
  const std::size_t num_heads = plan.num_heads;
  auto combine_one = [&](std::size_t i) {
    const std::size_t row = i / num_heads;
    if (plan.splits[row].num_partials == 0) return;
    combine_parts(step, plan.splits[row], step.first_tokens[row], static_cast<int>(i % num_heads), put);
  };
  operation.share(step.rows.size() * num_heads, num_heads / plan.num_kv_heads, combine_one, finish);
}

}  // namespace eventlm
