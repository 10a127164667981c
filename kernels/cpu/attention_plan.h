// Which passes over their contexts the rows of a step take, and in which pieces members of the team take those.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "program.h"

namespace eventlm {

// How contexts are dealt out to the members of a group, each a decoder of its own: in shards of so many tokens, each to
// the next member, and after the last one to the first again. A member that is alone has all.
struct ContextShards {
  std::int32_t num_tokens = 0;  // of a shard
  std::int32_t num_members = 1, number = 0;

  // How many of the first `position` tokens this member has, whose first shard of the context is `first_shard`.
  int own(int position, int first_shard) const {
    if (num_members == 1) return position;
    const int num_whole = position / num_tokens, rest = position % num_tokens;
    const int num_own = num_whole > first_shard ? (num_whole - first_shard - 1) / num_members + 1 : 0;
    return num_own * num_tokens + (num_whole % num_members == first_shard ? rest : 0);
  }
  // Whether it has the token at `position`.
  bool has(int position, int first_shard) const {
    return num_members == 1 || position / num_tokens % num_members == first_shard;
  }
  // Of a context of so many tokens, how many members have any.
  int num_holders(int length) const { return std::min(num_members, (length + num_tokens - 1) / num_tokens); }
  // The member that has the shard `number` of the context.
  int holder(int shard, int first_shard) const { return (number + num_members - first_shard + shard) % num_members; }
};

// One row of a step: num_tokens tokens after `start` others.
struct StepRow {
  std::int32_t start, num_tokens;
  // Of what this member has of the context, from its shard `first_shard` on.
  const std::int32_t* blocks;
  std::int32_t first_shard = 0;
  // Where several members have a part of the context and compute this row: the number of its first token among those
  // of all such rows; else -1.
  std::int32_t first_shared = -1;

  bool is_shared() const { return first_shared >= 0; }
};

// A pass over part of what a member has of the context, by rows of the step that share a head. `partial`: where it
// leaves what it has of a context of several passes; -1: there is only this one.
struct AttentionItem {
  std::int32_t row, first_query, num_queries, begin, end, partial;
  bool is_first;  // of the context's
};

// Of a row whose context takes several passes: the number of the first, and how many there are; 0 of others.
struct AttentionSplit {
  std::int32_t first_partial, num_partials;
};

// The first token that a query sees which is the sequence's `limit`th.
inline int first_visible(int limit, int window) { return window > 0 ? std::max(limit - window, 0) : 0; }

// For the layers with one window and one shape of heads. Decodes go over their context in passes of a fixed length,
// prompts in tiles of queries. Passes begin where the row alone says, in the sub-block of the first token that it sees.
class AttentionPlan {
 public:
  // Of an `attend`.
  explicit AttentionPlan(const Instruction& now)
      : window(now.window), num_heads(now.num_heads), num_kv_heads(now.num_kv_heads), head_dim(now.head_dim) {}

  bool is_for(const Instruction& now) const {
    return window == now.window && num_heads == now.num_heads && num_kv_heads == now.num_kv_heads &&
           head_dim == now.head_dim;
  }

  void make(const std::vector<StepRow>& rows, const ContextShards& shards, int num_members) {
    const int group = num_heads / num_kv_heads;
    const int queries_at_once = std::max(1, most_query_rows(head_dim) / group);
    items.clear();
    splits.assign(rows.size(), {0, 0});
    num_partials = 0;
    for (std::size_t number = 0; number < rows.size(); number++) {
      const StepRow& row = rows[number];
      const auto at = static_cast<std::int32_t>(number);
      if (row.num_tokens == 1) {
        const int limit = row.start + 1;
        add_decode(at, shards.own(first_visible(limit, window), row.first_shard), shards.own(limit, row.first_shard));
        continue;
      }
      for (int first = 0; first < row.num_tokens; first += queries_at_once) {
        const int count = std::min(queries_at_once, row.num_tokens - first), before = row.start + first;
        const int begin = shards.own(first_visible(before + 1, window), row.first_shard) / kSubBlock * kSubBlock;
        items.push_back({at, first, count, begin, shards.own(before + count, row.first_shard), -1, true});
      }
    }
    divide(num_members);
  }

  const int window, num_heads, num_kv_heads, head_dim;
  std::vector<AttentionItem> items;
  std::vector<AttentionSplit> splits;  // of each row
  std::int32_t num_partials = 0;
  // Of items and a key-value head each: where each piece begins, and the end.
  std::vector<std::size_t> first_passes;

 private:
  // Context that one pass of a decode goes over: longer ones are split so that several threads share them. Fixed, so
  // that a result does not depend on who else is in the step.
  static constexpr int kContextPerPass = 1024;
  // A member takes several passes at a time: a share of all that they cost, and at most so many.
  static constexpr int kPiecesPerMember = 4;
  static constexpr std::size_t kMostPasses = 8;

  // Of a query that sees the tokens from `first` to before `length`; there is a pass even if it sees none.
  void add_decode(std::int32_t row, int first, int length) {
    auto end_of = [&](int pass) {
      return std::min((first + (pass + 1) * kContextPerPass + kSubBlock - 1) / kSubBlock * kSubBlock, length);
    };
    const bool is_split = end_of(0) < length;
    if (is_split) splits[row].first_partial = num_partials;
    for (int pass = 0, begin = first / kSubBlock * kSubBlock; pass == 0 || begin < length; begin = end_of(pass++)) {
      items.push_back({row, 0, 1, begin, end_of(pass), is_split ? num_partials++ : -1, pass == 0});
      if (is_split) splits[row].num_partials++;
    }
  }

  // Puts the longest passes first, so that the threads end together, and divides all into pieces.
  void divide(int num_members) {
    const std::size_t num_passes = items.size() * num_kv_heads;
    auto cost = [](const AttentionItem& item) {
      return static_cast<std::int64_t>(item.num_queries) * (item.end - item.begin);
    };
    std::stable_sort(items.begin(), items.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    std::int64_t all = 0, taken = 0;
    for (const AttentionItem& item : items) all += cost(item) * num_kv_heads;
    const std::int64_t most = all / (kPiecesPerMember * num_members);
    first_passes = {0};
    for (std::size_t pass = 1; pass < num_passes; pass++) {
      taken += cost(items[(pass - 1) / num_kv_heads]);
      const bool is_full = taken + cost(items[pass / num_kv_heads]) > most;
      if (is_full || pass - first_passes.back() == kMostPasses) first_passes.push_back(pass), taken = 0;
    }
    first_passes.push_back(num_passes);
  }
};

}  // namespace eventlm
