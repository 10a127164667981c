// Rows times a panel where registers have eight lanes or four, and there are 16 of them: AVX2, SSE2. (NEON has more.)
//
// So that what is summed stays in registers, either few rows go over many columns, or four rows over few; a panel is
// gone over as often as that takes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

constexpr int kRowsAtOnce = 4;
// Vectors of columns that are multiplied at once.
constexpr int vectors_at_once(int num_rows) { return num_rows < kRowsAtOnce ? 4 : 2; }
constexpr int kPanelVectors = kPanel / kNative;

// Products of bf16, of a word's even and odd inputs one after the other; sums as `dot_pairs` has them.
struct Floats {
  using Sums = f32x16;
  using Native = f32xn;

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

  static EVENTLM_INLINE u32xn even_columns(u32xn words) { return (u32xn)((i16xn)((i16xn)words << 8) >> 8); }
  static EVENTLM_INLINE u32xn odd_columns(u32xn words) { return (u32xn)((i16xn)words >> 8); }
  static EVENTLM_INLINE u32xn even_inputs(u32xn words) { return words & 0x00ff00ffu; }
  static EVENTLM_INLINE u32xn odd_inputs(u32xn words) { return (words >> 8) & 0x00ff00ffu; }
  static EVENTLM_INLINE i32xn add_products(i32xn sums, u32xn columns, u32xn inputs) {
    return dot_int16_pairs(sums, columns, inputs);
  }
};

// NUM_ROWS rows times NUM_VECTORS vectors of a panel's columns, from `weights` on.
template <class Numbers, int NUM_ROWS, int NUM_VECTORS>
EVENTLM_INLINE void multiply_columns(const std::uint32_t* weights, const std::uint32_t* inputs, std::size_t num_groups,
                                     PanelAhead& ahead, typename Numbers::Native (&sums)[NUM_ROWS][NUM_VECTORS]) {
  for (std::size_t group = 0; group < num_groups; group++, inputs += kTileRows * kLanes) {
    for (int pair = 0; pair < kLanes; pair++, weights += kPanel) {
      __builtin_prefetch(ahead.bytes, 0, 2);
      ahead.bytes += ahead.step;
      u32xn columns[NUM_VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < NUM_VECTORS; v++) columns[v] = Numbers::even_columns(load<u32xn>(weights + v * kNative));
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; r++) {
        const u32xn input = Numbers::even_inputs(in_all_lanes(inputs[r * kLanes + pair]));
#pragma GCC unroll 8
        for (int v = 0; v < NUM_VECTORS; v++) sums[r][v] = Numbers::add_products(sums[r][v], columns[v], input);
      }
#pragma GCC unroll 8
      for (int v = 0; v < NUM_VECTORS; v++) columns[v] = Numbers::odd_columns(load<u32xn>(weights + v * kNative));
#pragma GCC unroll 8
      for (int r = 0; r < NUM_ROWS; r++) {
        const u32xn input = Numbers::odd_inputs(in_all_lanes(inputs[r * kLanes + pair]));
#pragma GCC unroll 8
        for (int v = 0; v < NUM_VECTORS; v++) sums[r][v] = Numbers::add_products(sums[r][v], columns[v], input);
      }
    }
  }
}

// NUM_ROWS rows of one tile times a panel; put(row, panel, left half, right half) takes the sums.
template <class Numbers, int NUM_ROWS, int NUM_PANELS, class Put>
EVENTLM_INLINE void multiply_tile(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, Put&& put,
                                  PanelAhead ahead) {
  static_assert(NUM_PANELS == 1);
  constexpr int kVectors = vectors_at_once(NUM_ROWS);
  ahead.step = ahead.step * kVectors / kPanelVectors;
  typename Numbers::Native all[NUM_ROWS][kPanelVectors];
#pragma GCC unroll 1
  for (int first = 0; first < kPanelVectors; first += kVectors) {
    typename Numbers::Native sums[NUM_ROWS][kVectors] = {};
    multiply_columns<Numbers>(matrix.panel(panel) + first * kNative, rows.row(row), rows.num_groups, ahead, sums);
    for (int r = 0; r < NUM_ROWS; r++) {
      for (int v = 0; v < kVectors; v++) all[r][first + v] = sums[r][v];
    }
  }
  using Sums = typename Numbers::Sums;
  for (int r = 0; r < NUM_ROWS; r++) {
    put(row + r, panel, load<Sums>(&all[r][0]), load<Sums>(&all[r][kPanelVectors / 2]));
  }
}

}  // namespace eventlm
