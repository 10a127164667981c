// Rows times a panel where a register has sixteen lanes and there are 32 of them: AVX-512.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

constexpr int kRowsAtOnce = 8;

// Sums of products of bf16, as instructions give them.
struct Floats {
  using Sums = f32x16;
  // From how many rows on tiles are faster than vectors.
  static constexpr int kTilesFromRows = 4;

  static EVENTLM_INLINE Sums dot(Sums sums, u32x16 columns, u32x16 inputs) { return dot_pairs(sums, columns, inputs); }
};

// Products of four signed bytes in each lane of the columns with unsigned ones, exact.
struct Integers {
  using Sums = i32x16;
  static constexpr int kTilesFromRows = 3;

  static EVENTLM_INLINE Sums dot(Sums sums, u32x16 columns, u32x16 inputs) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)inputs, (__m512i)columns);
  }
};

// NUM_ROWS rows of one tile times NUM_PANELS panels that lie one after the other; put(row, panel, left half, right
// half) takes the sums.
template <class Numbers, int NUM_ROWS, int NUM_PANELS, class Put>
EVENTLM_INLINE void multiply_tile(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, Put&& put,
                                  PanelAhead ahead) {
  typename Numbers::Sums sums[NUM_ROWS][2 * NUM_PANELS] = {};
  const std::uint32_t* weights = matrix.panel(panel);
  const std::uint32_t* inputs = rows.row(row);
  const std::size_t panel_words = matrix.panel_words();
  for (std::size_t group = 0; group < rows.num_groups; group++) {
    for (int pair = 0; pair < kLanes; pair++, weights += kPanel) {
      u32x16 columns[2 * NUM_PANELS];
#pragma GCC unroll 8
      for (int half = 0; half < 2 * NUM_PANELS; half++) {
        columns[half] = load<u32x16>(weights + half / 2 * panel_words + half % 2 * kLanes);
      }
      if constexpr (NUM_PANELS == 1) {
        __builtin_prefetch(ahead.bytes, 0, 2);
        __builtin_prefetch(ahead.bytes + kLineBytes, 0, 2);
        ahead.bytes += ahead.step;
      }
#pragma GCC unroll 16
      for (int r = 0; r < NUM_ROWS; r++) {
        const u32x16 input = u32x16{} + inputs[r * kLanes + pair];
#pragma GCC unroll 8
        for (int half = 0; half < 2 * NUM_PANELS; half++)
          sums[r][half] = Numbers::dot(sums[r][half], columns[half], input);
      }
    }
    inputs += kTileRows * kLanes;
  }
  for (int r = 0; r < NUM_ROWS; r++) {
    for (int p = 0; p < NUM_PANELS; p++) put(row + r, panel + p, sums[r][2 * p], sums[r][2 * p + 1]);
  }
}

// Up to kRowsAtOnce rows, the number as a template's argument so that the sums are registers.
template <class Numbers, int NUM_ROWS, class Put>
EVENTLM_INLINE void multiply_rows(const Matrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                                  Put&& put, PanelAhead ahead) {
  if constexpr (NUM_ROWS > 0) {
    if (count == NUM_ROWS) {
      multiply_tile<Numbers, NUM_ROWS, 1>(matrix, panel, rows, row, put, ahead);
    } else {
      multiply_rows<Numbers, NUM_ROWS - 1>(matrix, panel, rows, row, count, put, ahead);
    }
  }
}

// The rows [first, last), of one block, times the panels [begin, end).
template <class Numbers, class Put>
void multiply_vectors(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                      Put&& put) {
  std::size_t panel = begin;
  // A single row has too few sums under way to hide an addition's latency: four panels together.
  if (last - first <= 2) {
    for (; panel + 4 <= end; panel += 4) {
      if (last - first == 1) {
        multiply_tile<Numbers, 1, 4>(matrix, panel, rows, first, put, {});
      } else {
        multiply_tile<Numbers, 2, 4>(matrix, panel, rows, first, put, {});
      }
    }
  }
  // If there are several passes, each asks for its part of the next panel: so memory is read while all of them
  // multiply, and not only while the first does. One alone is as fast as the processor's own look ahead.
  const std::size_t panel_bytes = matrix.panel_words() * sizeof(std::uint32_t), num_rows = last - first;
  for (; panel < end; panel++) {
    const char* bytes = reinterpret_cast<const char*>(matrix.panel(panel));
    for (int row = first; row < last;) {
      const int count = std::min({kRowsAtOnce, last - row, kTileRows - row % kTileRows});
      PanelAhead ahead{bytes, 0};
      if (num_rows > kRowsAtOnce) {
        ahead = {bytes + panel_bytes + panel_bytes * (row - first) / num_rows, 2 * kLineBytes * count / num_rows};
      }
      multiply_rows<Numbers, kRowsAtOnce>(matrix, panel, rows, row, count, put, ahead);
      row += count;
    }
  }
}

}  // namespace eventlm
