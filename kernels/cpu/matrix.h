// A weight matrix [out, in] in bf16 or int8, packed once for the instructions that multiply by it, or in codes
// (packed.h).
//
// A panel is 32 output columns: [in / 2][32] words of two bf16, the even input low, or [in / 4][32] words of four int8
// and a `PanelEnd`. So 64 bytes are what an instruction of AVX-512 takes and what a row of an AMX tile is; a panel is
// one stream of memory. The input is padded with zeros to 64 bytes, the output to a whole panel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "packed.h"
#include "quantize.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

// What a pass of rows over a panel asks memory for meanwhile.
struct PanelAhead {
  const char* bytes;
  std::size_t step;  // for each two lines that are multiplied
};

// Where a source row lies among the packed columns.
enum class Columns {
  plain,  // one after the other
  heads,  // the same, but every head begins a panel
  gate,   // the first half of a panel: gate and up of the same neurons lie beside each other
  up,     // the second half
};

// After a panel of int8: the scale of each column, and the excess of its sums because of kInputOffset.
struct PanelEnd {
  f32x16 scales[2];
  i32x16 offsets[2];
};

struct Matrix {
  std::uint32_t* panels = nullptr;
  std::size_t num_out = 0;
  std::size_t num_in = 0;
  bool is_int8 = false;
  // Instead: matrices of codes, whose panels follow one another. Those of gate and up are multiplied together, as if
  // they shared panels.
  PackedMatrix parts[4];
  int num_parts = 0;
  bool has_gate = false;

  std::size_t num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  // Words of a column.
  std::size_t num_words() const { return is_int8 ? round_up(num_in, 64) / 4 : round_up(num_in, 32) / 2; }
  std::size_t panel_words() const { return num_words() * kPanel + (is_int8 ? sizeof(PanelEnd) / 4 : 0); }
  std::size_t num_bytes() const {
    std::size_t bytes = num_parts > 0 ? 0 : num_panels() * panel_words() * 4;
    for (int part = 0; part < num_parts; part++) bytes += parts[part].num_bytes();
    return bytes;
  }
  // Gives it that many bytes, from a multiple of 64 on.
  void set_memory(char* bytes) {
    panels = reinterpret_cast<std::uint32_t*>(bytes);
    for (int part = 0; part < num_parts; part++) {
      parts[part].panels = reinterpret_cast<std::uint8_t*>(bytes);
      bytes += parts[part].num_bytes();
    }
  }
  const std::uint32_t* panel(std::size_t number) const { return panels + number * panel_words(); }
  const PanelEnd& end(std::size_t number) const {
    return *reinterpret_cast<const PanelEnd*>(panel(number) + num_words() * kPanel);
  }

  static std::size_t column(Columns columns, std::size_t row, std::size_t head_dim) {
    if (columns == Columns::plain) return row;
    if (columns == Columns::heads) return row / head_dim * round_up(head_dim, kPanel) + row % head_dim;
    return row / 16 * kPanel + row % 16 + (columns == Columns::up ? 16 : 0);
  }

  // A row becomes column `at`.
  void pack(const bf16* row, std::size_t at) { is_int8 ? pack_int8(row, at) : pack_bf16(row, at); }

  // What was packed as column `at`, as floats [in].
  void unpack(std::size_t at, float* to) const {
    if (num_parts > 0) return parts[0].unpack(at, to);
    const std::uint32_t* words = panel(at / kPanel) + at % kPanel;
    if (!is_int8) {
      const bf16* from = reinterpret_cast<const bf16*>(words);
      for (std::size_t i = 0; i < num_in; i++) to[i] = to_float(from[i / 2 * (2 * kPanel) + i % 2]);
      return;
    }
    const std::int8_t* from = reinterpret_cast<const std::int8_t*>(words);
    const float scale = end(at / kPanel).scales[at % kPanel / kLanes][at % kLanes];
    for (std::size_t first = 0; first < num_in; first += kBlock) {
      float block[kBlock];
      for (std::size_t i = 0; i < kBlock; i++) block[i] = from[(first + i) / 4 * (4 * kPanel) + i % 4] * scale;
      rotate_row(block, kBlock);
      std::copy_n(block, std::min<std::size_t>(kBlock, num_in - first), to + first);
    }
  }

 private:
  void pack_bf16(const bf16* from, std::size_t at) {
    bf16* to = reinterpret_cast<bf16*>(panels + at / kPanel * panel_words() + at % kPanel);
    for (std::size_t i = 0; i < num_in; i++) to[i / 2 * (2 * kPanel) + i % 2] = from[i];
  }

  // Rotates twice, as there is no memory for a whole row (see Team::run).
  void pack_int8(const bf16* from, std::size_t at) {
    f32x16 block[kBlock / kLanes], largest = {}, nothing = {};
    for (std::size_t first = 0; first < num_in; first += kBlock) {
      get_rotated(from, first, block);
      for (const f32x16& part : block) {
        largest = vmax(largest, magnitude(part));
        nothing += part * 0.0f;
      }
    }
    const Scale scale(max_of(largest), kInt8Max);
    std::uint32_t* words = panels + at / kPanel * panel_words() + at % kPanel;
    std::uint32_t* to = words;
    i32x16 sums = {};
    for (std::size_t first = 0; first < num_in; first += kBlock) {
      get_rotated(from, first, block);
      for (const f32x16& part : block) {
        const i8x16 values = __builtin_convertvector(to_int(part * scale.inverse), i8x16);
        sums += __builtin_convertvector(values, i32x16);
        std::uint32_t quads[kLanes / 4];
        store(quads, values);
        for (std::uint32_t quad : quads) *to = quad, to += kPanel;
      }
    }
    std::int32_t sum = 0;
    for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
    std::uint32_t* end = words + num_words() * kPanel;
    store(end, scale.step + sum_of(nothing));
    store(end + kPanel, sum * kInputOffset);
  }

  // The block of a source row that begins with input `first`, zeros after the last.
  void get_rotated(const bf16* from, std::size_t first, f32x16 (&block)[kBlock / kLanes]) const {
    alignas(64) bf16 inputs[kBlock] = {};
    std::copy_n(from + first, std::min<std::size_t>(kBlock, num_in - first), inputs);
    for (int part = 0; part < kBlock / kLanes; part++) block[part] = load_bf16(inputs + part * kLanes);
    rotate(block);
  }
};

}  // namespace eventlm
