// Attention over keys and values in blocks: query rows of one sequence and one key-value head against its context, in
// one pass with a running maximum (Milakov and Gimelshein, 2018; Dao et al., 2022).
//
// A cache block of one head holds `block_size` tokens in sub-blocks of 16. Keys of a sub-block are [head_dim / 2][16]
// words of two bf16 (of one token), so that `dot_pairs` scores 16 tokens at once; values are [8][head_dim] words of two
// bf16 (of two tokens), so that it adds two tokens at once. What lies behind a sequence in its last sub-block is never
// used, whatever it is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tiles.h"
#include "vec.h"

namespace eventlm {

constexpr int kSubBlock = 16;
// Tokens whose scores are kept between the two products.
constexpr int kContextAtOnce = 64;
// Query rows (tokens x heads of a key-value head) that share a pass over the context.
constexpr int kQueryRows = 32;
constexpr int kMaxHeadDim = 256;

// One layer's keys and values.
struct KVCache {
  std::uint32_t* keys;
  std::uint32_t* values;
  int num_kv_heads;
  int block_size;
  int head_dim;

  // Words of the sub-block that has place `place` of the block.
  std::size_t offset(int block, int head, int place) const {
    const std::size_t head_words = static_cast<std::size_t>(block_size) * head_dim / 2;
    return (static_cast<std::size_t>(block) * num_kv_heads + head) * head_words +
           static_cast<std::size_t>(place / kSubBlock) * kSubBlock * head_dim / 2;
  }

  // key and value: of one token, [head_dim] floats.
  void put(int block, int head, int place, const float* key, const float* value) const {
    alignas(64) bf16 narrow[kMaxHeadDim];
    for (int d = 0; d < head_dim; d += kLanes) store_bf16(narrow + d, load<f32x16>(key + d));
    std::uint32_t* k = keys + offset(block, head, place) + place % kSubBlock;
    for (int pair = 0; pair < head_dim / 2; pair++) k[pair * kSubBlock] = load<std::uint32_t>(narrow + pair * 2);
    for (int d = 0; d < head_dim; d += kLanes) store_bf16(narrow + d, load<f32x16>(value + d));
    bf16* v =
        reinterpret_cast<bf16*>(values + offset(block, head, place) + place % kSubBlock / 2 * head_dim) + place % 2;
    for (int d = 0; d < head_dim; d++) v[d * 2] = narrow[d];
  }
};

// Queries of one sequence and one key-value head, and the part of the context that they see.
struct AttentionTile {
  const std::uint32_t* queries[kQueryRows];  // [head_dim / 2] words each, scaled by log2(e) / sqrt(head_dim)
  int limit[kQueryRows];                     // how many tokens of the sequence each sees
  int num_rows;
  const std::int32_t* blocks;
  int head;
  int begin, end;  // of the context, in tokens; begin is a multiple of 16
};

// Where a pass stands; [row] or [row][head_dim].
struct AttentionState {
  float maximum[kQueryRows];
  float sum[kQueryRows];
  alignas(64) float output[kQueryRows * kMaxHeadDim];
};

template <int NUM_ROWS, int NUM_SUB_BLOCKS>
EVENTLM_INLINE void score_rows(const std::uint32_t* const* keys, int num_pairs, const std::uint32_t* const* queries,
                               float* scores) {
  f32x16 sums[NUM_ROWS][NUM_SUB_BLOCKS] = {};
  for (int pair = 0; pair < num_pairs; pair++) {
    u32x16 key[NUM_SUB_BLOCKS];
#pragma GCC unroll 4
    for (int s = 0; s < NUM_SUB_BLOCKS; s++) key[s] = load<u32x16>(keys[s] + pair * kSubBlock);
#pragma GCC unroll 8
    for (int row = 0; row < NUM_ROWS; row++) {
      const u32x16 query = u32x16{} + queries[row][pair];
#pragma GCC unroll 4
      for (int s = 0; s < NUM_SUB_BLOCKS; s++) sums[row][s] = dot_pairs(sums[row][s], key[s], query);
    }
  }
  for (int row = 0; row < NUM_ROWS; row++) {
    for (int s = 0; s < NUM_SUB_BLOCKS; s++) store(scores + row * kContextAtOnce + s * kSubBlock, sums[row][s]);
  }
}

// Scores of some sub-blocks for all rows; so many at once that additions need not wait for each other.
template <int NUM_SUB_BLOCKS>
EVENTLM_INLINE void score(const std::uint32_t* const* keys, int num_pairs, const AttentionTile& tile, float* scores) {
  int row = 0;
  for (; row + 4 <= tile.num_rows; row += 4) {
    score_rows<4, NUM_SUB_BLOCKS>(keys, num_pairs, tile.queries + row, scores + row * kContextAtOnce);
  }
  switch (tile.num_rows - row) {
    case 3:
      return score_rows<3, NUM_SUB_BLOCKS>(keys, num_pairs, tile.queries + row, scores + row * kContextAtOnce);
    case 2:
      return score_rows<2, NUM_SUB_BLOCKS>(keys, num_pairs, tile.queries + row, scores + row * kContextAtOnce);
    case 1:
      return score_rows<1, NUM_SUB_BLOCKS>(keys, num_pairs, tile.queries + row, scores + row * kContextAtOnce);
  }
}

// Scores to weights relative to the new maximum, as pairs of bf16; returns what earlier outputs are to be scaled by.
EVENTLM_INLINE float weigh(float* scores, int num_sub_blocks, int visible, float& maximum, float& sum,
                           std::uint32_t* weights) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 most = splat(-INFINITY);
  const int count = num_sub_blocks * kSubBlock;
  if (visible < count) {
    for (int c = 0; c < count; c += kLanes) {
      store(scores + c, lanes + c < visible ? load<f32x16>(scores + c) : splat(-INFINITY));
    }
  }
  for (int c = 0; c < count; c += kLanes) most = vmax(most, load<f32x16>(scores + c));
  const float before = maximum;
  maximum = std::max(before, max_of(most));
  f32x16 total = {};
  for (int c = 0; c < count; c += kLanes) {
    const f32x16 weight = exp2_of(load<f32x16>(scores + c) - maximum);
    total += weight;
    store_bf16(reinterpret_cast<bf16*>(weights) + c, weight);
  }
  const float scale = exp2_of(splat(before - maximum))[0];
  sum = sum * scale + sum_of(total);
  return scale;
}

// output[row][64 values] = output * scale + weights x values of these token pairs.
template <int NUM_ROWS, int NUM_VECTORS>
EVENTLM_INLINE void add_values(const std::uint32_t* const* values, int num_pairs, bool last_is_half,
                               const std::uint32_t* weights, const float* scales, float* output, int stride) {
  f32x16 sums[NUM_ROWS][NUM_VECTORS];
  for (int row = 0; row < NUM_ROWS; row++) {
    for (int v = 0; v < NUM_VECTORS; v++) sums[row][v] = load<f32x16>(output + row * stride + v * kLanes) * scales[row];
  }
  for (int pair = 0; pair < num_pairs; pair++) {
    u32x16 both[NUM_VECTORS];
    for (int v = 0; v < NUM_VECTORS; v++) {
      both[v] = load<u32x16>(values[pair] + v * kLanes);
      if (last_is_half && pair == num_pairs - 1) both[v] &= 0xffffu;
    }
#pragma GCC unroll 8
    for (int row = 0; row < NUM_ROWS; row++) {
      const u32x16 weight = u32x16{} + weights[row * (kContextAtOnce / 2) + pair];
      for (int v = 0; v < NUM_VECTORS; v++) sums[row][v] = dot_pairs(sums[row][v], both[v], weight);
    }
  }
  for (int row = 0; row < NUM_ROWS; row++) {
    for (int v = 0; v < NUM_VECTORS; v++) store(output + row * stride + v * kLanes, sums[row][v]);
  }
}

template <int NUM_VECTORS>
EVENTLM_INLINE void add_all_values(const std::uint32_t* const* values, int num_pairs, bool last_is_half,
                                   const std::uint32_t* weights, const float* scales, int num_rows, float* output,
                                   int stride) {
  int row = 0;
  for (; row + 4 <= num_rows; row += 4) {
    add_values<4, NUM_VECTORS>(values, num_pairs, last_is_half, weights + row * (kContextAtOnce / 2), scales + row,
                               output + row * stride, stride);
  }
  weights += row * (kContextAtOnce / 2), scales += row, output += row * stride;
  switch (num_rows - row) {
    case 3:
      return add_values<3, NUM_VECTORS>(values, num_pairs, last_is_half, weights, scales, output, stride);
    case 2:
      return add_values<2, NUM_VECTORS>(values, num_pairs, last_is_half, weights, scales, output, stride);
    case 1:
      return add_values<1, NUM_VECTORS>(values, num_pairs, last_is_half, weights, scales, output, stride);
  }
}

// Where the keys and values of the tokens [c, c + count) are, by sub-block.
struct ContextPart {
  const std::uint32_t* keys[kContextAtOnce / kSubBlock];
  const std::uint32_t* values[kContextAtOnce / kSubBlock];
  int count;
  int num_sub_blocks;
};

inline ContextPart part_of(const KVCache& cache, const AttentionTile& tile, int c) {
  ContextPart part;
  part.count = std::min(kContextAtOnce, tile.end - c);
  part.num_sub_blocks = (part.count + kSubBlock - 1) / kSubBlock;
  for (int s = 0; s < part.num_sub_blocks; s++) {
    const int place = c + s * kSubBlock;
    const std::size_t at = cache.offset(tile.blocks[place / cache.block_size], tile.head, place % cache.block_size);
    part.keys[s] = cache.keys + at;
    part.values[s] = cache.values + at;
  }
  return part;
}

inline void score_vectors(const ContextPart& part, int head_dim, const AttentionTile& tile, float* scores) {
  if (part.num_sub_blocks == 4) return score<4>(part.keys, head_dim / 2, tile, scores);
  for (int s = 0; s < part.num_sub_blocks; s++) score<1>(part.keys + s, head_dim / 2, tile, scores + s * kSubBlock);
}

inline void add_vectors(const ContextPart& part, int head_dim, int num_rows, const std::uint32_t* weights,
                        const float* scales, float* output) {
  const std::uint32_t* values[kContextAtOnce / 2];
  const int num_pairs = (part.count + 1) / 2;
  for (int pair = 0; pair < num_pairs; pair++) values[pair] = part.values[pair / 8] + pair % 8 * head_dim;
  const bool last_is_half = part.count % 2 != 0;
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) {
    add_all_values<4>(values, num_pairs, last_is_half, weights, scales, num_rows, output + d, head_dim);
    for (int pair = 0; pair < num_pairs; pair++) values[pair] += 64;
  }
  for (; d < head_dim; d += kLanes) {
    add_all_values<1>(values, num_pairs, last_is_half, weights, scales, num_rows, output + d, head_dim);
    for (int pair = 0; pair < num_pairs; pair++) values[pair] += kLanes;
  }
}

#if defined(__AMX_BF16__)

// Rows from which on tiles are faster than vectors, and what they want of a head.
constexpr int kTileQueryRows = 12;
inline bool fits_tiles(const AttentionTile& tile, int head_dim) {
  return tile.num_rows >= kTileQueryRows && head_dim % 32 == 0;
}

// queries: [rows][head_dim / 2], one after the other.
template <bool IS_WIDE>
inline void score_tiles(const ContextPart& part, int head_dim, const std::uint32_t* queries, float* scores) {
  for (int s = 0; s < part.num_sub_blocks; s += 2) {
    const std::uint32_t* left = part.keys[s];
    const std::uint32_t* right = s + 1 < part.num_sub_blocks ? part.keys[s + 1] : left;
    zero_sums<IS_WIDE>();
    for (int pair = 0; pair < head_dim / 2; pair += 16) {
      add_products<IS_WIDE>(queries + pair, head_dim / 2, left + pair * kSubBlock, right + pair * kSubBlock, kSubBlock);
    }
    store_sums<IS_WIDE>(scores + s * kSubBlock, kContextAtOnce);
  }
}

template <bool IS_WIDE>
inline void add_value_tiles(const ContextPart& part, int head_dim, int num_rows, const std::uint32_t* weights,
                            const float* scales, float* output) {
  for (int row = 0; row < num_rows; row++) {
    if (scales[row] == 1.0f) continue;
    for (int d = 0; d < head_dim; d += kLanes)
      store(output + row * head_dim + d, load<f32x16>(output + row * head_dim + d) * scales[row]);
  }
  // Whatever lies behind the last token must be zero here: a weight of zero does not cancel a NaN.
  alignas(64) std::uint32_t last[kSubBlock / 2 * kMaxHeadDim];
  const std::uint32_t* values[kContextAtOnce / kSubBlock];
  std::copy_n(part.values, part.num_sub_blocks, values);
  if (const int rest = part.count % kSubBlock; rest != 0) {
    const std::uint32_t* from = part.values[part.num_sub_blocks - 1];
    std::copy_n(from, rest / 2 * head_dim, last);
    std::fill(last + rest / 2 * head_dim, last + kSubBlock / 2 * head_dim, 0u);
    if (rest % 2 != 0) {
      for (int d = 0; d < head_dim; d++) last[rest / 2 * head_dim + d] = from[rest / 2 * head_dim + d] & 0xffffu;
    }
    values[part.num_sub_blocks - 1] = last;
  }
  for (int d = 0; d < head_dim; d += 32) {
    load_sums<IS_WIDE>(output + d, head_dim);
    for (int s = 0; s < part.num_sub_blocks; s++) {
      add_products<IS_WIDE>(weights + s * kSubBlock / 2, kContextAtOnce / 2, values[s] + d, values[s] + d + 16,
                            head_dim);
    }
    store_sums<IS_WIDE>(output + d, head_dim);
  }
}

#endif

// Asks for what the next pass reads: blocks lie anywhere, so that the processor cannot guess.
inline void prefetch(const KVCache& cache, const AttentionTile& tile, int c) {
  if (c >= tile.end) return;
  const ContextPart part = part_of(cache, tile, c);
  for (int s = 0; s < part.num_sub_blocks; s++) {
    for (int word = 0; word < kSubBlock * cache.head_dim / 2; word += 16) {
      __builtin_prefetch(part.keys[s] + word);
      __builtin_prefetch(part.values[s] + word);
    }
  }
}

inline void attend(const KVCache& cache, const AttentionTile& tile, AttentionState& state) {
  const int head_dim = cache.head_dim, num_rows = tile.num_rows;
  alignas(64) float scores[kQueryRows * kContextAtOnce];
  alignas(64) std::uint32_t weights[kQueryRows * kContextAtOnce / 2];
  float scales[kQueryRows];
  std::fill_n(state.maximum, num_rows, -INFINITY);
  std::fill_n(state.sum, num_rows, 0.0f);
  std::fill_n(state.output, num_rows * head_dim, 0.0f);
#if defined(__AMX_BF16__)
  const bool uses_tiles = fits_tiles(tile, head_dim), is_wide = num_rows > 16;
  const int first_rows = std::min(num_rows, 16), second_rows = std::max(num_rows - 16, 0);
  alignas(64) std::uint32_t queries[kQueryRows * kMaxHeadDim / 2];
  if (uses_tiles) {
    for (int row = 0; row < num_rows; row++) std::copy_n(tile.queries[row], head_dim / 2, queries + row * head_dim / 2);
  }
#endif
  for (int c = tile.begin; c < tile.end; c += kContextAtOnce) {
    const ContextPart part = part_of(cache, tile, c);
    prefetch(cache, tile, c + kContextAtOnce);
#if defined(__AMX_BF16__)
    if (uses_tiles) {
      configure_tiles(first_rows, second_rows);
      is_wide ? score_tiles<true>(part, head_dim, queries, scores)
              : score_tiles<false>(part, head_dim, queries, scores);
    } else
#endif
      score_vectors(part, head_dim, tile, scores);
    for (int row = 0; row < num_rows; row++) {
      scales[row] = weigh(scores + row * kContextAtOnce, part.num_sub_blocks, tile.limit[row] - c, state.maximum[row],
                          state.sum[row], weights + row * kContextAtOnce / 2);
    }
#if defined(__AMX_BF16__)
    if (uses_tiles) {
      configure_tiles<kSubBlock / 2>(first_rows, second_rows);
      is_wide ? add_value_tiles<true>(part, head_dim, num_rows, weights, scales, state.output)
              : add_value_tiles<false>(part, head_dim, num_rows, weights, scales, state.output);
      continue;
    }
#endif
    add_vectors(part, head_dim, num_rows, weights, scales, state.output);
  }
}

}  // namespace eventlm
