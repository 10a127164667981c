// A weight matrix [out, in] in bf16 or int8, packed once for the instructions that multiply by it.
//
// A panel is 32 output columns: [in / 2][32] words of two bf16, the even input low, or [in / 4][32] words of four int8
// and a `PanelEnd`. So 64 bytes are what `dot_pairs` or `dot_quads` takes and what a row of an AMX tile is; a panel is
// one stream of memory. The input is padded with zeros to 64 bytes, the output to a whole panel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "quantize.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

constexpr int kPanel = 32;

// Where a source row lies among the packed columns.
enum class Columns {
  plain,  // one after the other
  heads,  // the same, but every head begins a panel
  gate,   // the first half of a panel: gate and up of the same neurons lie beside each other
  up,     // the second half
};

// Behind a panel of int8: of each column the scale, and what its sums have too much because of kInputOffset.
struct PanelEnd {
  f32x16 scales[2];
  i32x16 offsets[2];
};

struct Matrix {
  std::uint32_t* panels = nullptr;
  std::size_t num_out = 0;
  std::size_t num_in = 0;
  bool is_int8 = false;

  std::size_t num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  // Words of a column.
  std::size_t num_words() const { return is_int8 ? round_up(num_in, 64) / 4 : round_up(num_in, 32) / 2; }
  std::size_t panel_words() const { return num_words() * kPanel + (is_int8 ? sizeof(PanelEnd) / 4 : 0); }
  std::size_t num_bytes() const { return num_panels() * panel_words() * 4; }
  const std::uint32_t* panel(std::size_t number) const { return panels + number * panel_words(); }
  const PanelEnd& end(std::size_t number) const {
    return *reinterpret_cast<const PanelEnd*>(panel(number) + num_words() * kPanel);
  }

  static std::size_t column(Columns columns, std::size_t row, std::size_t head_dim) {
    if (columns == Columns::plain) return row;
    if (columns == Columns::heads) return row / head_dim * round_up(head_dim, kPanel) + row % head_dim;
    return row / 16 * kPanel + row % 16 + (columns == Columns::up ? 16 : 0);
  }

  // `source` [num_rows, in], the rows of a weight from first_row on, become columns, counted from `first`.
  void pack(const bf16* source, std::size_t first_row, std::size_t num_rows, std::size_t first, Columns columns,
            std::size_t head_dim) {
    for (std::size_t row = 0; row < num_rows; row++) {
      const std::size_t at = first + column(columns, first_row + row, head_dim);
      is_int8 ? pack_int8(source + row * num_in, at) : pack_bf16(source + row * num_in, at);
    }
  }

  // What was packed as column `at`, as floats [in].
  void unpack(std::size_t at, float* to) const {
    const std::uint32_t* words = panel(at / kPanel) + at % kPanel;
    if (!is_int8) {
      const bf16* from = reinterpret_cast<const bf16*>(words);
      for (std::size_t i = 0; i < num_in; i++) to[i] = to_float(from[i / 2 * (2 * kPanel) + i % 2]);
      return;
    }
    const std::int8_t* from = reinterpret_cast<const std::int8_t*>(words);
    const float scale = end(at / kPanel).scales[at % kPanel / kLanes][at % kLanes];
    std::vector<float> row(num_words() * 4);
    for (std::size_t i = 0; i < row.size(); i++) row[i] = from[i / 4 * (4 * kPanel) + i % 4] * scale;
    rotate_row(row.data(), row.size());
    std::copy_n(row.data(), num_in, to);
  }

 private:
  void pack_bf16(const bf16* from, std::size_t at) {
    bf16* to = reinterpret_cast<bf16*>(panels + at / kPanel * panel_words() + at % kPanel);
    for (std::size_t i = 0; i < num_in; i++) to[i / 2 * (2 * kPanel) + i % 2] = from[i];
  }

  void pack_int8(const bf16* from, std::size_t at) {
    std::vector<float> row(num_words() * 4);
    for (std::size_t i = 0; i < num_in; i++) row[i] = to_float(from[i]);
    rotate_row(row.data(), row.size());
    float largest = 0, nothing = 0;
    for (float value : row) {
      largest = std::max(largest, std::fabs(value));
      nothing += value * 0.0f;
    }
    const Scale scale(largest, kInt8Max);
    std::uint32_t* words = panels + at / kPanel * panel_words() + at % kPanel;
    std::int8_t* to = reinterpret_cast<std::int8_t*>(words);
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < row.size(); i++) {
      const auto value = static_cast<std::int8_t>(std::lrintf(row[i] * scale.inverse));
      to[i / 4 * (4 * kPanel) + i % 4] = value;
      sum += value;
    }
    std::uint32_t* end = words + num_words() * kPanel;
    store(end, scale.step + nothing);
    store(end + kPanel, sum * kInputOffset);
  }
};

}  // namespace eventlm
