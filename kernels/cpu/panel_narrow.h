// Rows times panels where registers have eight lanes or four, and there are 16 of them: AVX2, SSE2. (NEON has more.)
//
// Sums of two rows, or of one with two panels, are as many as stay in registers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

constexpr int kRowsAtOnce = 2;
// Vectors of a panel's columns that are multiplied at once.
constexpr int kVectorsAtOnce = 4;
constexpr int kPanelVectors = kPanel / kNative;

// Products of bf16, of a word's even and odd inputs one after the other; sums as `dot_pairs` has them.
struct Floats {
  using Sums = f32x16;
  using Native = f32xn;
  // Panels that a single row is multiplied by at once: with one, it would wait for its additions.
  static constexpr int kPanelsAtOnce = 2;

  static EVENTLM_INLINE u32xn even_columns(u32xn words) { return words << 16; }
  static EVENTLM_INLINE u32xn odd_columns(u32xn words) { return words & 0xffff0000u; }
  static EVENTLM_INLINE u32xn even_inputs(u32xn words) { return even_columns(words); }
  static EVENTLM_INLINE u32xn odd_inputs(u32xn words) { return odd_columns(words); }
  static EVENTLM_INLINE f32xn add_products(f32xn sums, u32xn columns, u32xn inputs) {
    return sums + (f32xn)columns * (f32xn)inputs;
  }
};

// Products of a word's four signed bytes with unsigned inputs, exact: widened to 16 bits, the even ones and the odd
// ones, for instructions that multiply bytes add two products in 16 bits.
struct Integers {
  using Sums = i32x16;
  using Native = i32xn;
  // Those of integers take a cycle.
  static constexpr int kPanelsAtOnce = 1;

  static EVENTLM_INLINE u32xn even_columns(u32xn words) { return (u32xn)((i16xn)((i16xn)words << 8) >> 8); }
  static EVENTLM_INLINE u32xn odd_columns(u32xn words) { return (u32xn)((i16xn)words >> 8); }
  static EVENTLM_INLINE u32xn even_inputs(u32xn words) { return words & 0x00ff00ffu; }
  static EVENTLM_INLINE u32xn odd_inputs(u32xn words) { return (words >> 8) & 0x00ff00ffu; }
  static EVENTLM_INLINE i32xn add_products(i32xn sums, u32xn columns, u32xn inputs) {
    return dot_int16_pairs(sums, columns, inputs);
  }
};

// NUM_ROWS rows times kVectorsAtOnce vectors of columns of each of NUM_PANELS panels, the first from `weights` on.
//
// A function of its own: what is live around it would take the registers of sums.
template <class Numbers, int NUM_ROWS, int NUM_PANELS>
[[gnu::noinline]] void multiply_columns(const std::uint32_t* weights, std::size_t panel_words,
                                        const std::uint32_t* inputs, std::size_t num_groups, PanelAhead ahead,
                                        typename Numbers::Native (&out)[NUM_ROWS][NUM_PANELS][kVectorsAtOnce]) {
  constexpr int kVectors = NUM_PANELS * kVectorsAtOnce;
  typename Numbers::Native sums[NUM_ROWS][kVectors] = {};
  // The products of a pair's even inputs, or of its odd ones.
  const auto add_half = [&](auto columns_of, auto inputs_of, const std::uint32_t* pair_inputs,
                            const std::uint32_t* pair_weights) __attribute__((always_inline)) {
    u32xn row_inputs[NUM_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < NUM_ROWS; r++) row_inputs[r] = inputs_of(in_all_lanes(pair_inputs[r * kLanes]));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      const u32xn columns =
          columns_of(load<u32xn>(pair_weights + v / kVectorsAtOnce * panel_words + v % kVectorsAtOnce * kNative));
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; r++) sums[r][v] = Numbers::add_products(sums[r][v], columns, row_inputs[r]);
    }
  };
  for (std::size_t group = 0; group < num_groups; group++, inputs += kTileRows * kLanes) {
    for (int pair = 0; pair < kLanes; pair++, weights += kPanel) {
      __builtin_prefetch(ahead.bytes, 0, 2);
      ahead.bytes += ahead.step;
      add_half(Numbers::even_columns, Numbers::even_inputs, inputs + pair, weights);
      add_half(Numbers::odd_columns, Numbers::odd_inputs, inputs + pair, weights);
    }
  }
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int v = 0; v < kVectors; v++) out[r][v / kVectorsAtOnce][v % kVectorsAtOnce] = sums[r][v];
  }
}

// NUM_ROWS rows of one tile times NUM_PANELS panels that lie one after the other; put(row, panel, left half, right
// half) takes the sums.
template <class Numbers, int NUM_ROWS, int NUM_PANELS, class Put>
EVENTLM_INLINE void multiply_tile(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, Put&& put,
                                  PanelAhead& ahead) {
  typename Numbers::Native all[NUM_ROWS][NUM_PANELS][kPanelVectors];
#pragma GCC unroll 1
  for (int first = 0; first < kPanelVectors; first += kVectorsAtOnce) {
    typename Numbers::Native sums[NUM_ROWS][NUM_PANELS][kVectorsAtOnce];
    multiply_columns<Numbers, NUM_ROWS, NUM_PANELS>(matrix.panel(panel) + first * kNative, matrix.panel_words(),
                                                    rows.row(row), rows.num_groups, ahead, sums);
    ahead.bytes += ahead.step * rows.num_groups * kLanes;
    for (int r = 0; r < NUM_ROWS; r++) {
      for (int p = 0; p < NUM_PANELS; p++) std::copy_n(sums[r][p], kVectorsAtOnce, all[r][p] + first);
    }
  }
  using Sums = typename Numbers::Sums;
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int p = 0; p < NUM_PANELS; p++) {
      put(row + r, panel + p, load<Sums>(all[r][p]), load<Sums>(all[r][p] + kPanelVectors / 2));
    }
  }
}

// The rows [first, last), of one block, times NUM_PANELS panels, which lie one after the other.
template <class Numbers, int NUM_PANELS, class Put>
void multiply_panels(const Matrix& matrix, std::size_t panel, const Rows& rows, int first, int last, Put&& put) {
  // If there are several passes, each asks for its part of the next panels: so memory is read while all of them
  // multiply, and not only while the first does. One alone is as fast as the processor's own look ahead.
  const std::size_t num_rows = last - first, num_passes = kPanelVectors / kVectorsAtOnce * num_rows;
  const std::size_t row_step = num_rows >= 2 * kRowsAtOnce ? 2 * kLineBytes : 0;
  PanelAhead ahead{reinterpret_cast<const char*>(matrix.panel(panel) + NUM_PANELS * matrix.panel_words()), 0};
  for (int row = first; row < last;) {
    const int count = std::min({kRowsAtOnce, last - row, kTileRows - row % kTileRows});
    const std::size_t step = row_step * count / num_passes;
    if (count == 1) {
      ahead.step = NUM_PANELS * step;
      multiply_tile<Numbers, 1, NUM_PANELS>(matrix, panel, rows, row, put, ahead);
    } else {
      ahead.step = step;
      for (int p = 0; p < NUM_PANELS; p++) multiply_tile<Numbers, 2, 1>(matrix, panel + p, rows, row, put, ahead);
    }
    row += count;
  }
}

// The rows [first, last), of one block, times the panels [begin, end).
template <class Numbers, class Put>
void multiply_vectors(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                      Put&& put) {
  constexpr int kPanels = Numbers::kPanelsAtOnce;
  std::size_t panel = begin;
  for (; panel + kPanels <= end; panel += kPanels) {
    multiply_panels<Numbers, kPanels>(matrix, panel, rows, first, last, put);
  }
  for (; panel < end; panel++) multiply_panels<Numbers, 1>(matrix, panel, rows, first, last, put);
}

}  // namespace eventlm
