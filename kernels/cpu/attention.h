// Attention over keys and values in blocks: query rows of one sequence and one key-value head against its context, in
// one pass with a running maximum (Milakov and Gimelshein, 2018; Dao et al., 2022).
//
// Here by vectors, which is what few rows want: nothing of the context is copied, elements are widened in registers. By
// tiles in attention_tiles.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention_state.h"
#include "attention_tiles.h"
#include "kv_cache.h"
#include "vec.h"

namespace eventlm {

// Tokens whose scores are kept between the two products.
constexpr int kContextAtOnce = 64;
#if defined(__AVX512F__)
constexpr int kSubBlocksTogether = 4, kValueVectors = 4;
#else
constexpr int kSubBlocksTogether = 1, kValueVectors = kLanes / kNative;
#endif
constexpr int kSubBlockVectors = kSubBlock / kNative;
// Of a head's elements, those whose values are summed at once.
constexpr int kWideValues = kValueVectors * kNative;

// Where the keys and values of some tokens are, by sub-block: those from `begin` on up to the next multiple of 64. So
// which tokens a row passes over together depends on nothing else.
template <class Format>
struct ContextPart {
  using Pair = typename Format::Pair;

  const Pair* keys[kContextAtOnce / kSubBlock];
  const Pair* values[kContextAtOnce / kSubBlock];
  int count;
  int num_sub_blocks;

  static int end_of(int begin) { return (begin / kContextAtOnce + 1) * kContextAtOnce; }

  ContextPart(const KVCache& cache, const ContextRange& range, int begin) {
    count = std::max(std::min(range.end, end_of(begin)) - begin, 0);
    num_sub_blocks = (count + kSubBlock - 1) / kSubBlock;
    for (int s = 0; s < num_sub_blocks; s++) {
      const int token = begin + s * kSubBlock;
      const std::size_t at = cache.offset(range.blocks[token / cache.block_size], range.head, token % cache.block_size);
      keys[s] = elements_of<Format>(cache.keys + at);
      values[s] = elements_of<Format>(cache.values + at);
    }
  }
};

// Asks memory for a part's keys and values while the one before it is computed with.
template <class Format>
class PartAhead {
 public:
  PartAhead(const ContextPart<Format>& before, const ContextPart<Format>& part, int head_dim)
      : part_(part),
        lines_(kSubBlock * head_dim * static_cast<int>(sizeof(typename Format::Pair)) / 2 /
               static_cast<int>(kLineBytes)) {
    const int num_groups = before.num_sub_blocks / kSubBlocksTogether + before.num_sub_blocks % kSubBlocksTogether;
    const int num_chunks = head_dim / kWideValues + head_dim % kWideValues / kLanes;
    const int num_times = num_groups * head_dim / 2 + num_chunks * ((before.count + 1) / 2);
    at_once_ = (2 * part.num_sub_blocks * lines_ + num_times - 1) / num_times;
  }

  // To be called for each pair that is multiplied by the first rows.
  EVENTLM_INLINE void ask() {
    for (int i = 0; i < at_once_; i++, at_ += kLineBytes, left_--) {
      if (left_ == 0 && !advance()) return;
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  bool advance() {
    const int number = next_, count = part_.num_sub_blocks;
    if (number == 2 * count) return false;
    at_ = reinterpret_cast<const char*>(number < count ? part_.keys[number] : part_.values[number - count]);
    left_ = lines_;
    next_++;
    return true;
  }

  const ContextPart<Format>& part_;
  const int lines_;  // of a sub-block's keys, or values
  int at_once_;
  int next_ = 0, left_ = 0;
  const char* at_ = nullptr;
};

// Queries as a format's products take them, [rows][head_dim / 2] words, and what their scores are multiplied by.
struct QueryRows {
  alignas(64) std::uint32_t words[kVectorRows * kMaxHeadDim / 2];
  float factors[kVectorRows];
};

template <class Format>
inline void prepare(const AttentionTile& tile, int head_dim, QueryRows& queries) {
  for (int row = 0; row < tile.num_rows; row++) {
    const bf16* from = reinterpret_cast<const bf16*>(tile.queries[row]);
    bf16* to = reinterpret_cast<bf16*>(queries.words + row * head_dim / 2);
    if constexpr (!Format::kIsScaled) {
      std::copy_n(from, head_dim, to);
    } else if constexpr (std::is_same_v<Format, Fp8>) {
      for (int d = 0; d < head_dim; d += kLanes) store_bf16(to + d, load_bf16(from + d) * Fp8::kShift);
      queries.factors[row] = Fp8::kShift;
    } else {
      f32x16 most = {}, nothing = {};
      for (int d = 0; d < head_dim; d += kLanes) {
        const f32x16 values = load_bf16(from + d);
        most = vmax(most, vmax(values, -values));
        nothing += values * 0.0f;
      }
      const Int16Unit unit(max_of(most));
      for (int d = 0; d < head_dim; d += kLanes) store(to + d, unit.narrow(load_bf16(from + d)));
      // Integers know no NaN.
      queries.factors[row] = unit.size + sum_of(nothing);
    }
  }
}

// Calls work(count, row) for all rows, `count` of them from `row` on at a time: a constant, so that their sums are
// registers.
template <class Work>
EVENTLM_INLINE void for_rows(int num_rows, Work&& work) {
  for (int row = 0; row < num_rows; row += 4) {
    switch (std::min(num_rows - row, 4)) {
      case 4:
        work(std::integral_constant<int, 4>{}, row);
        break;
      case 3:
        work(std::integral_constant<int, 3>{}, row);
        break;
      case 2:
        work(std::integral_constant<int, 2>{}, row);
        break;
      case 1:
        work(std::integral_constant<int, 1>{}, row);
        break;
    }
  }
}

// Scores of 16 tokens times NUM_SUB_BLOCKS for NUM_ROWS rows from `row` on.
template <class Format, int NUM_ROWS, int NUM_SUB_BLOCKS>
EVENTLM_INLINE void score_rows(const typename Format::Pair* const* keys, PartAhead<Format>& ahead, int num_pairs,
                               const QueryRows& queries, int row, float* scores) {
  constexpr int kVectors = NUM_SUB_BLOCKS * kSubBlockVectors;
  typename Format::Sum sums[NUM_ROWS][kVectors] = {};
  const std::uint32_t* words = queries.words + row * num_pairs;
  for (int pair = 0; pair < num_pairs; pair++) {
    u32xn key[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) {
      key[v] = Format::pairs(keys[v / kSubBlockVectors] + pair * kSubBlock + v % kSubBlockVectors * kNative);
    }
    if (row == 0) ahead.ask();
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; r++) {
      const u32xn query = in_all_lanes(words[r * num_pairs + pair]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++) sums[r][v] = Format::dot(sums[r][v], key[v], query);
    }
  }
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int v = 0; v < kVectors; v++) {
      f32xn score;
      if constexpr (Format::kIsScaled) {
        const float* scales = scales_of(keys[v / kSubBlockVectors]) + v % kSubBlockVectors * kNative;
        score = to_floats(sums[r][v]) * queries.factors[row + r] * load<f32xn>(scales);
      } else {
        score = sums[r][v];
      }
      store(scores + (row + r) * kContextAtOnce + v * kNative, score);
    }
  }
}

// Scores of some sub-blocks for all rows; so many at once that additions need not wait for each other.
template <class Format, int NUM_SUB_BLOCKS>
EVENTLM_INLINE void score(const typename Format::Pair* const* keys, PartAhead<Format>& ahead, int num_pairs,
                          const QueryRows& queries, int num_rows, float* scores) {
  for_rows(num_rows, [&](auto count, int row) __attribute__((always_inline)) {
    score_rows<Format, count, NUM_SUB_BLOCKS>(keys, ahead, num_pairs, queries, row, scores);
  });
}

template <class Format>
void score_part(const ContextPart<Format>& part, PartAhead<Format>& ahead, int head_dim, const QueryRows& queries,
                int num_rows, float* scores) {
  int s = 0;
  for (; s + kSubBlocksTogether <= part.num_sub_blocks; s += kSubBlocksTogether) {
    score<Format, kSubBlocksTogether>(part.keys + s, ahead, head_dim / 2, queries, num_rows, scores + s * kSubBlock);
  }
  for (; s < part.num_sub_blocks; s++) {
    score<Format, 1>(part.keys + s, ahead, head_dim / 2, queries, num_rows, scores + s * kSubBlock);
  }
}

// Weights of 64 tokens as a format's products take them, and what sums of values by them are multiplied by.
struct WeightRows {
  alignas(64) std::uint32_t words[kVectorRows * kContextAtOnce / 2];
  float factors[kVectorRows];
  float scales[kVectorRows];  // of what was summed before
};

// One row's scores of a part, which begins with token `begin`, to weights relative to its new maximum.
template <class Format>
EVENTLM_INLINE void weigh(float* scores, const ContextPart<Format>& part, const AttentionTile& tile, int begin,
                          RowState& state, WeightRows& weights, int row) {
  const int count = part.num_sub_blocks * kSubBlock;
  limit_scores(scores, tile, row, begin, count);
  [[maybe_unused]] const int first = tile.first[row] - begin, visible = tile.limit[row] - begin;
  weights.scales[row] = raise(scores, count, state);
  bf16* to = reinterpret_cast<bf16*>(weights.words + row * kContextAtOnce / 2);
  f32x16 most = {}, nothing = {};
  for (int c = 0; c < count; c += kLanes) {
    f32x16 weight = weight_of(load<f32x16>(scores + c) - state.maximum);
    state.sum += weight;
    if constexpr (Format::kIsScaled) {
      weight *= load<f32x16>(scales_of(part.values[c / kSubBlock]));
      // The scale of a token that is not there may be anything.
      if (visible < c + kLanes) weight = kLaneNumbers + c < visible ? weight : f32x16{};
      if (first > c) weight = kLaneNumbers + c >= first ? weight : f32x16{};
    }
    if constexpr (std::is_same_v<Format, Int8>) {
      store(scores + c, weight);
      most = vmax(most, weight);
      nothing += weight * 0.0f;
    } else {
      if constexpr (std::is_same_v<Format, Fp8>) weight *= Fp8::kShift;
      store_bf16(to + c, weight);
    }
  }
  if constexpr (std::is_same_v<Format, Int8>) {
    const Int16Unit unit(max_of(most));
    for (int c = 0; c < count; c += kLanes) store(to + c, unit.narrow(load<f32x16>(scores + c)));
    weights.factors[row] = unit.size + sum_of(nothing);
  } else if constexpr (std::is_same_v<Format, Fp8>) {
    weights.factors[row] = Fp8::kShift;
  }
}

// output[row][kNative x NUM_VECTORS] = output * scale + weights x values of these token pairs.
template <class Format, int NUM_ROWS, int NUM_VECTORS>
EVENTLM_INLINE void add_values(const typename Format::Pair* const* values, PartAhead<Format>& ahead, int num_pairs,
                               bool last_is_half, const WeightRows& weights, int row, float* output, int stride) {
  typename Format::Sum sums[NUM_ROWS][NUM_VECTORS] = {};
  output += row * stride;
  if constexpr (!Format::kIsScaled) {
    for (int r = 0; r < NUM_ROWS; r++) {
      for (int v = 0; v < NUM_VECTORS; v++)
        sums[r][v] = load<f32xn>(output + r * stride + v * kNative) * weights.scales[row + r];
    }
  }
  const std::uint32_t* words = weights.words + row * kContextAtOnce / 2;
  for (int pair = 0; pair < num_pairs; pair++) {
    u32xn both[NUM_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < NUM_VECTORS; v++) {
      both[v] = Format::pairs(values[pair] + v * kNative);
      if (last_is_half && pair == num_pairs - 1) both[v] &= 0xffffu;
    }
    if (row == 0) ahead.ask();
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; r++) {
      const u32xn weight = in_all_lanes(words[r * (kContextAtOnce / 2) + pair]);
#pragma GCC unroll 4
      for (int v = 0; v < NUM_VECTORS; v++) sums[r][v] = Format::dot(sums[r][v], both[v], weight);
    }
  }
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int v = 0; v < NUM_VECTORS; v++) {
      float* to = output + r * stride + v * kNative;
      if constexpr (Format::kIsScaled) {
        store(to, load<f32xn>(to) * weights.scales[row + r] + to_floats(sums[r][v]) * weights.factors[row + r]);
      } else {
        store(to, sums[r][v]);
      }
    }
  }
}

template <class Format, int NUM_VECTORS>
EVENTLM_INLINE void add_all_values(const typename Format::Pair* const* values, PartAhead<Format>& ahead, int num_pairs,
                                   bool last_is_half, const WeightRows& weights, int num_rows, float* output,
                                   int stride) {
  for_rows(num_rows, [&](auto count, int row) __attribute__((always_inline)) {
    add_values<Format, count, NUM_VECTORS>(values, ahead, num_pairs, last_is_half, weights, row, output, stride);
  });
}

template <class Format>
void add_part(const ContextPart<Format>& part, PartAhead<Format>& ahead, int head_dim, int num_rows,
              const WeightRows& weights, float* output) {
  const typename Format::Pair* values[kContextAtOnce / 2];
  const int num_pairs = (part.count + 1) / 2;
  const bool last_is_half = part.count % 2 != 0;
  for (int pair = 0; pair < num_pairs; pair++) values[pair] = part.values[pair / 8] + pair % 8 * head_dim;
  auto advance = [&](int by) {
    for (int pair = 0; pair < num_pairs; pair++) values[pair] += by;
  };
  int d = 0;
  for (; d + kWideValues <= head_dim; d += kWideValues, advance(kWideValues)) {
    add_all_values<Format, kValueVectors>(values, ahead, num_pairs, last_is_half, weights, num_rows, output + d,
                                          head_dim);
  }
  for (; d < head_dim; d += kLanes, advance(kLanes)) {
    add_all_values<Format, kLanes / kNative>(values, ahead, num_pairs, last_is_half, weights, num_rows, output + d,
                                             head_dim);
  }
}

template <class Format>
void attend_by_vectors(const KVCache& cache, const AttentionTile& tile, const ContextRange& following,
                       AttentionState& state) {
  const int head_dim = cache.head_dim, num_rows = tile.num_rows;
  QueryRows queries;
  WeightRows weights;
  alignas(64) float scores[kVectorRows * kContextAtOnce];
  prepare<Format>(tile, head_dim, queries);
  ContextPart<Format> part(cache, tile, tile.begin);
  for (int c = tile.begin, end; c < tile.end; c = end) {
    end = part.end_of(c);
    const ContextPart<Format> next =
        end < tile.end ? ContextPart<Format>(cache, tile, end) : ContextPart<Format>(cache, following, following.begin);
    PartAhead<Format> ahead(part, next, head_dim);
    score_part(part, ahead, head_dim, queries, num_rows, scores);
    for (int row = 0; row < num_rows; row++) {
      weigh(scores + row * kContextAtOnce, part, tile, c, state.rows[row], weights, row);
    }
    add_part(part, ahead, head_dim, num_rows, weights, state.output);
    part = next;
  }
}

// The most rows that a tile of queries may have.
inline int most_query_rows(int head_dim) {
#if defined(__AMX_BF16__)
  if (head_dim % kTileHeadDim == 0) return kQueryRows;
#endif
  return kVectorRows;
}

template <class Format>
void attend_to(const KVCache& cache, const AttentionTile& tile, const ContextRange& following, AttentionState& state) {
#if defined(__AMX_BF16__)
  if (fits_tiles(tile, cache.head_dim)) return attend_by_tiles<Format>(cache, tile, state);
#endif
  attend_by_vectors<Format>(cache, tile, following, state);
}

// following: what this thread attends to next, which is asked for at the end; empty if nothing is known.
inline void attend(const KVCache& cache, const AttentionTile& tile, const ContextRange& following,
                   AttentionState& state) {
  std::fill_n(state.rows, tile.num_rows, RowState{{}, kNothingSeen});
  for (int row = 0; tile.sinks && row < tile.num_rows; row++) {
    state.rows[row] = RowState{f32x16{1.0f}, tile.sinks[row % tile.group] * kLog2E};
  }
  std::fill_n(state.output, tile.num_rows * cache.head_dim, 0.0f);
  switch (cache.format) {
    case KVFormat::bf16:
      return attend_to<Bf16>(cache, tile, following, state);
    case KVFormat::int8:
      return attend_to<Int8>(cache, tile, following, state);
    case KVFormat::fp8:
      return attend_to<Fp8>(cache, tile, following, state);
  }
}

}  // namespace eventlm
