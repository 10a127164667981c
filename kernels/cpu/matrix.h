// A weight matrix [out, in] in bf16, packed once for the instructions that multiply by it.
//
// A panel is 32 output columns: [in / 2][32] words of two bf16, the even input low. So 64 bytes are what `dot_pairs`
// takes and what a row of an AMX tile is; a panel is one stream of memory. The input is padded with zeros to a multiple
// of 32, the output to a whole panel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vec.h"

namespace eventlm {

constexpr int kPanel = 32;

inline std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

// Where a source row lies among the packed columns.
enum class Columns {
  plain,  // one after the other
  gate,   // the first half of a panel: gate and up of the same neurons lie beside each other
  up,     // the second half
};

struct Matrix {
  std::uint32_t* panels = nullptr;
  std::size_t num_out = 0;
  std::size_t num_in = 0;

  std::size_t num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  std::size_t num_pairs() const { return round_up(num_in, 32) / 2; }
  std::size_t panel_words() const { return num_pairs() * kPanel; }
  std::size_t num_bytes() const { return num_panels() * panel_words() * 4; }
  const std::uint32_t* panel(std::size_t number) const { return panels + number * panel_words(); }

  static std::size_t column(Columns columns, std::size_t row) {
    if (columns == Columns::plain) return row;
    return row / 16 * kPanel + row % 16 + (columns == Columns::up ? 16 : 0);
  }

  // Rows [begin, end) of `source` [rows, in] become columns, counted from `first`.
  void pack(const bf16* source, std::size_t begin, std::size_t end, std::size_t first, Columns columns) {
    for (std::size_t row = begin; row < end; row++) {
      const std::size_t at = first + column(columns, row);
      bf16* to = reinterpret_cast<bf16*>(panels + at / kPanel * panel_words() + at % kPanel);
      const bf16* from = source + row * num_in;
      for (std::size_t i = 0; i < num_in; i++) to[i / 2 * (2 * kPanel) + i % 2] = from[i];
    }
  }

  // What was packed as column `at`, as floats [in].
  void unpack(std::size_t at, float* to) const {
    const bf16* from = reinterpret_cast<const bf16*>(panel(at / kPanel) + at % kPanel);
    for (std::size_t i = 0; i < num_in; i++) to[i] = to_float(from[i / 2 * (2 * kPanel) + i % 2]);
  }
};

}  // namespace eventlm
