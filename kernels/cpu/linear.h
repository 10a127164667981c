// Products of activations [rows, in] in bf16 with a packed matrix, in float32 sums.
//
// A sum runs over the input from its beginning to its end in one accumulator, whatever the number of rows and threads:
// a row's result does not depend on its neighbours, as long as the same instructions are used (AMX rounds otherwise).
#pragma once

#include <algorithm>
#include <cstdint>

#include "matrix.h"
#include "team.h"
#include "tiles.h"
#include "vec.h"

namespace eventlm {

#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 12;
#else
constexpr int kRowsAtOnce = 3;
#endif

// Activations as pairs of bf16, [rows, stride] words; padded with zeros like the matrix.
struct Rows {
  const std::uint32_t* pairs;
  std::size_t stride;
  int count;
};

// NUM_ROWS rows times NUM_PANELS panels that lie one after the other; put(row, panel, left half, right half) takes the
// sums.
template <int NUM_ROWS, int NUM_PANELS, class Put>
EVENTLM_INLINE void multiply_tile(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, Put&& put) {
  f32x16 sums[NUM_ROWS][2 * NUM_PANELS] = {};
  const std::uint32_t* weights = matrix.panel(panel);
  const std::uint32_t* inputs = rows.pairs + row * rows.stride;
  const std::size_t stride = rows.stride, num_pairs = matrix.num_pairs(), panel_words = matrix.panel_words();
  for (std::size_t pair = 0; pair < num_pairs; pair++) {
    u32x16 columns[2 * NUM_PANELS];
#pragma GCC unroll 8
    for (int half = 0; half < 2 * NUM_PANELS; half++) {
      columns[half] = load<u32x16>(weights + half / 2 * panel_words + pair * kPanel + half % 2 * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < NUM_ROWS; r++) {
      const u32x16 input = u32x16{} + inputs[r * stride + pair];
#pragma GCC unroll 8
      for (int half = 0; half < 2 * NUM_PANELS; half++) sums[r][half] = dot_pairs(sums[r][half], columns[half], input);
    }
  }
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int p = 0; p < NUM_PANELS; p++) put(row + r, panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
  }
}

// Up to kRowsAtOnce rows, the number as a template's argument so that the sums are registers.
template <int NUM_ROWS, class Put>
EVENTLM_INLINE void multiply_rows(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                                  Put&& put) {
  if constexpr (NUM_ROWS > 0) {
    if (count == NUM_ROWS) {
      multiply_tile<NUM_ROWS, 1>(matrix, panel, rows, row, put);
    } else {
      multiply_rows<NUM_ROWS - 1>(matrix, panel, rows, row, count, put);
    }
  }
}

template <class Put>
void multiply_vectors(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, Put&& put) {
  std::size_t panel = begin;
#if defined(__AVX512F__)
  // A single row has too few sums under way to hide an addition's latency: four panels together.
  if (rows.count <= 2) {
    for (; panel + 4 <= end; panel += 4) {
      if (rows.count == 1) {
        multiply_tile<1, 4>(matrix, panel, rows, 0, put);
      } else {
        multiply_tile<2, 4>(matrix, panel, rows, 0, put);
      }
    }
  }
#endif
  for (; panel < end; panel++) {
    for (int row = 0; row < rows.count; row += kRowsAtOnce) {
      multiply_rows<kRowsAtOnce>(matrix, panel, rows, row, std::min(kRowsAtOnce, rows.count - row), put);
    }
  }
}

#if defined(__AMX_BF16__)

// Pairs of input that are multiplied before the next rows have their turn: weights of that many stay in the first
// cache.
constexpr std::size_t kPairsAtOnce = 64;
// Rows whose sums are kept beside: 32 columns of them are 32 KiB.
constexpr int kSumRows = 256;

template <bool IS_WIDE>
EVENTLM_INLINE void add_tiles(const std::uint32_t* weights, const Rows& rows, int row, std::size_t begin,
                              std::size_t end, float* sums) {
  const std::uint32_t* inputs = rows.pairs + row * rows.stride;
  begin == 0 ? zero_sums<IS_WIDE>() : load_sums<IS_WIDE>(sums, kPanel);
  for (std::size_t pair = begin; pair < end; pair += 16) {
    const std::uint32_t* left = weights + pair * kPanel;
    add_products<IS_WIDE>(inputs + pair, rows.stride, left, left + 16, kPanel);
  }
  store_sums<IS_WIDE>(sums, kPanel);
}

template <class Put>
void multiply_tiles(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, Put&& put) {
  alignas(64) thread_local float sums[kSumRows * kPanel];
  const std::size_t num_pairs = matrix.num_pairs();
  // Some rows with all panels, so that their inputs stay in the second cache.
  for (int first = 0; first < rows.count; first += kSumRows) {
    const int count = std::min(kSumRows, rows.count - first), whole = count / 32 * 32, tail = count - whole;
    for (std::size_t panel = begin; panel < end; panel++) {
      const std::uint32_t* weights = matrix.panel(panel);
      for (std::size_t pair = 0; pair < num_pairs; pair += kPairsAtOnce) {
        const std::size_t until = std::min(pair + kPairsAtOnce, num_pairs);
        if (whole > 0) configure_tiles(16, 16);
        for (int row = 0; row < whole; row += 32)
          add_tiles<true>(weights, rows, first + row, pair, until, sums + row * kPanel);
        if (tail > 0) configure_tiles(std::min(tail, 16), std::max(tail - 16, 0));
        if (tail > 16) add_tiles<true>(weights, rows, first + whole, pair, until, sums + whole * kPanel);
        if (tail > 0 && tail <= 16) add_tiles<false>(weights, rows, first + whole, pair, until, sums + whole * kPanel);
      }
      for (int row = 0; row < count; row++) {
        put(first + row, panel, load<f32x16>(sums + row * kPanel), load<f32x16>(sums + row * kPanel + kLanes));
      }
    }
  }
}

// From how many rows on tiles are faster than vectors.
constexpr int kTileRows = 5;

#endif

// The panels [begin, end) for all rows.
template <class Put>
void multiply(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, Put&& put) {
#if defined(__AMX_BF16__)
  if (rows.count >= kTileRows) return multiply_tiles(matrix, begin, end, rows, put);
#endif
  multiply_vectors(matrix, begin, end, rows, put);
}

// One member's share of a product; the members take groups of panels by the ticket until none is left.
template <class Put>
void multiply_shared(Team& team, Ticket& ticket, const Matrix& matrix, const Rows& rows, Put&& put) {
  const std::size_t num_panels = matrix.num_panels();
  // Small enough that the members end together, large enough that a ticket is nothing beside it; four panels at least.
  const std::size_t group = std::clamp<std::size_t>(num_panels / (8 * team.size()) / 4 * 4, 4, 64);
  for (;;) {
    const std::size_t begin = ticket.next() * group;
    if (begin >= num_panels) return;
    multiply(matrix, begin, std::min(begin + group, num_panels), rows, put);
  }
}

}  // namespace eventlm
