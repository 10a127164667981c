// Attention by AMX tiles, for many query rows: the part of the context that is gone over is widened to bf16 and
// its values laid out for the second product once for all of them.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>
#include <cstdint>

#include "attention_state.h"
#include "kv_cache.h"
#include "tiles.h"
#include "vec.h"

namespace eventlm {

// Rows from which on tiles are faster than vectors, and what a head must be a multiple of.
constexpr int kTileQueryRows = 12, kTileHeadDim = 32;
inline bool fits_tiles(const AttentionTile& tile, int head_dim) {
  return tile.num_rows >= kTileQueryRows && head_dim % kTileHeadDim == 0;
}

constexpr int kTileContext = 128;
constexpr int kTileSubBlocks = kTileContext / kSubBlock;

// A part of the context: keys by sub-block as the cache has them, values as [head_dim / 16][pairs of tokens][16] words
// with zeros after the last token, since a weight of zero does not cancel a NaN.
struct TilePart {
  const std::uint32_t* keys[kTileSubBlocks];
  int count;
  alignas(64) std::uint32_t values[kTileContext / 2 * kMaxHeadDim];
  alignas(64) std::uint32_t wide_keys[kTileContext / 2 * kMaxHeadDim];
};

// What a pass keeps beside its state.
struct TileScratch {
  TilePart part;
  alignas(64) std::uint32_t queries[kQueryRows * kMaxHeadDim / 2];
  alignas(64) float scores[32 * kTileContext];
  alignas(64) std::uint32_t weights[32 * kTileContext / 2];
};

// 16 pairs of a format of one byte, the even and the odd elements multiplied by scales, as pairs of bf16.
template <class Format>
EVENTLM_INLINE u32x16 widen(const typename Format::Pair* from, f32x16 even_scale, f32x16 odd_scale) {
  f32x16 even, odd;
  Format::floats(from, even, odd);
  return bf16_pairs(even * even_scale, odd * odd_scale);
}

template <class Format>
inline void load_part(const KVCache& cache, const AttentionTile& tile, int begin, TilePart& part) {
  const int head_dim = cache.head_dim;
  part.count = std::min(kTileContext, tile.end - begin);
  const int num_sub_blocks = (part.count + kSubBlock - 1) / kSubBlock;
  for (int s = 0; s < num_sub_blocks; s++) {
    const int token = begin + s * kSubBlock, here = std::min(kSubBlock, part.count - s * kSubBlock);
    const std::size_t at = cache.offset(tile.blocks[token / cache.block_size], tile.head, token % cache.block_size);
    const auto* keys = elements_of<Format>(cache.keys + at);
    const auto* values = elements_of<Format>(cache.values + at);
    if constexpr (Format::kIsScaled) {
      std::uint32_t* wide = part.wide_keys + s * kSubBlock * head_dim / 2;
      const f32x16 scale = load<f32x16>(scales_of(keys));
      for (int word = 0; word < kSubBlock * head_dim / 2; word += kLanes)
        store(wide + word, widen<Format>(keys + word, scale, scale));
      part.keys[s] = wide;
    } else {
      part.keys[s] = keys;
    }
    for (int pair = 0; pair < kSubBlock / 2; pair++) {
      const int left = here - pair * 2;  // 1: the second token of the pair is not there
      std::uint32_t* to = part.values + (s * (kSubBlock / 2) + pair) * kLanes;
      for (int d = 0; d < head_dim; d += kLanes, to += kTileContext / 2 * kLanes) {
        u32x16 both = {};
        if (left > 0) {
          const auto* from = values + pair * head_dim + d;
          if constexpr (Format::kIsScaled) {
            both = widen<Format>(from, splat(scales_of(values)[pair * 2]), splat(scales_of(values)[pair * 2 + 1]));
          } else {
            both = load<u32x16>(from);
          }
          if (left == 1) both &= 0xffffu;
        }
        store(to, both);
      }
    }
  }
  // A product takes two sub-blocks.
  if (num_sub_blocks % 2 == 0) return;
  part.keys[num_sub_blocks] = part.keys[num_sub_blocks - 1];
  for (int d = 0; d < head_dim; d += kLanes) {
    std::uint32_t* to = part.values + (d * kTileContext / 2) + num_sub_blocks * (kSubBlock / 2) * kLanes;
    std::fill_n(to, kSubBlock / 2 * kLanes, 0u);
  }
}

// 32 or, unless IS_WIDE, 16 rows from `first` on against the first `num_tokens` (a multiple of 32) of a part.
template <bool IS_WIDE>
inline void attend_rows(const AttentionTile& tile, int head_dim, int begin, int first, int num_rows, int num_tokens,
                        TileScratch& scratch, AttentionState& state) {
  const TilePart& part = scratch.part;
  const std::uint32_t* queries = scratch.queries + first * head_dim / 2;
  float* output = state.output + first * head_dim;
  for (int s = 0; s < num_tokens / kSubBlock; s += 2) {
    zero_sums<IS_WIDE>();
    for (int pair = 0; pair < head_dim / 2; pair += 16) {
      add_products<IS_WIDE>(queries + pair, queries + pair + 16 * head_dim / 2, head_dim / 2,
                            part.keys[s] + pair * kSubBlock, part.keys[s + 1] + pair * kSubBlock, kSubBlock);
    }
    store_sums<IS_WIDE>(scratch.scores + s * kSubBlock, kTileContext);
  }
  for (int r = 0; r < num_rows; r++) {
    RowState& row = state.rows[first + r];
    float* scores = scratch.scores + r * kTileContext;
    bf16* weights = reinterpret_cast<bf16*>(scratch.weights + r * kTileContext / 2);
    limit_scores(scores, tile, first + r, begin, num_tokens);
    if (const float scale = raise(scores, num_tokens, row); scale != 1.0f) {
      float* to = output + r * head_dim;
      for (int d = 0; d < head_dim; d += kLanes) store(to + d, load<f32x16>(to + d) * scale);
    }
    for (int c = 0; c < num_tokens; c += kLanes) {
      const f32x16 weight = weight_of(load<f32x16>(scores + c) - row.maximum);
      row.sum += weight;
      store_bf16(weights + c, weight);
    }
  }
  for (int d = 0; d < head_dim; d += 32) {
    const std::uint32_t* left = part.values + d * (kTileContext / 2);
    const std::uint32_t* right = left + kLanes * (kTileContext / 2);
    load_sums<IS_WIDE>(output + d, head_dim);
    for (int pair = 0; pair < num_tokens / 2; pair += 16) {
      add_products<IS_WIDE>(scratch.weights + pair, scratch.weights + pair + 16 * kTileContext / 2, kTileContext / 2,
                            left + pair * kLanes, right + pair * kLanes, kLanes);
    }
    store_sums<IS_WIDE>(output + d, head_dim);
  }
}

template <class Format>
void attend_by_tiles(const KVCache& cache, const AttentionTile& tile, AttentionState& state) {
  TileScratch scratch;
  const int head_dim = cache.head_dim;
  for (int row = 0; row < tile.num_rows; row++)
    std::copy_n(tile.queries[row], head_dim / 2, scratch.queries + row * head_dim / 2);
  // Rows after the last one are computed from whatever is there, and not used.
  configure_tiles(16, 16);
  for (int c = tile.begin; c < tile.end; c += kTileContext) {
    load_part<Format>(cache, tile, c, scratch.part);
    for (int first = 0; first < tile.num_rows; first += 32) {
      const int count = std::min(32, tile.num_rows - first);
      const int visible = std::min(scratch.part.count, tile.limit[first + count - 1] - c);
      if (visible <= 0 || tile.first[first] >= c + scratch.part.count) continue;
      const int num_tokens = (visible + 31) / 32 * 32;
      count > 16 ? attend_rows<true>(tile, head_dim, c, first, count, num_tokens, scratch, state)
                 : attend_rows<false>(tile, head_dim, c, first, count, num_tokens, scratch, state);
    }
  }
}

}  // namespace eventlm

#endif
