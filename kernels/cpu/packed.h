// Weights [out, in] as codes of 4, 5, 6 or 8 bits in groups of 16, 32 or 128 inputs, value for value what files have.
//
// A panel is 32 output columns, and one stream of memory. It is made of spans: the scales and minima of a span's
// groups, then their codes. The nibbles of two quads of inputs lie together, [group / 8][32] words; the codes' other
// bits follow, a word for each column. Codes of 8 bits lie as they are, [group / 4][32] words, but floats of 8 bits as
// pairs of inputs, [group / 2][32].
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows.h"
#include "vec.h"

namespace eventlm {

// By the numbers that GGUF files give them. The last five are of other files: the bits of a code and the inputs of a
// group, which has a float32 as its scale, and a zero if it is not of floats.
enum class PackedType : std::int32_t {
  none = -1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  iq4_xs = 23,
  mxfp4 = 39,
  i4_32 = 1000,
  i4_128 = 1001,
  i8_32 = 1002,
  i8_128 = 1003,
  f8_128 = 1004,
};

enum class Scales : std::uint8_t {
  halves,    // fp16
  bytes,     // unsigned integers times an fp16 for 256 inputs
  integers,  // the same, signed
  powers,    // E8M0, halved
  floats,    // float32
};

// What codes stand for if not for themselves.
enum class Table : std::uint8_t { none, iq4, fp4, fp8 };

// There is none of fp8: E4M3 is computed, as 1/256 of what it is, which its scales make good.
constexpr std::uint8_t kTables[4][16] = {
    {},
    // The values of IQ4_NL, plus 128.
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    // Twice those of E2M1, plus 16.
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
};

// Bytes of a word of each column of a panel.
constexpr std::size_t kWordsBytes = 4 * kPanel;

// A weight is scale * (code - offset), or scale * code + minimum, where `bytes` have minima that are subtracted, and
// `floats` have a zero in their place, an fp16: scale * (code - zero).
struct Format {
  int bits, group;
  Scales scales;
  bool has_minima;
  int offset;  // a power of two, or 0
  Table table;
  std::size_t block_bytes;  // of the file

  constexpr bool is_float8() const { return table == Table::fp8; }
  constexpr bool is_nested() const { return scales == Scales::bytes || scales == Scales::integers; }
  // Inputs of a block of the file, and of a span.
  constexpr std::size_t block() const { return is_nested() ? 256 : scales == Scales::floats ? group : 32; }
  constexpr std::size_t span() const { return scales == Scales::powers || scales == Scales::floats ? 128 : block(); }
  constexpr std::size_t groups() const { return span() / group; }
  // Of a group.
  constexpr std::size_t scale_bytes() const {
    return scales == Scales::floats ? 4 * kPanel : scales == Scales::halves ? 2 * kPanel : kPanel;
  }
  constexpr std::size_t minimum_bytes() const {
    return !has_minima ? 0 : scales == Scales::floats ? 2 * kPanel : scale_bytes();
  }
  constexpr std::size_t code_bytes() const { return group * bits * kPanel / 8; }
  // From a column to the next.
  constexpr std::size_t code_step() const { return is_float8() ? 2 : 4; }
  // Within a span. It begins with the fp16 that its scales are under, if any, and those of its minima.
  constexpr std::size_t first_scale() const { return !is_nested() ? 0 : has_minima ? 4 * kPanel : 2 * kPanel; }
  constexpr std::size_t first_minimum() const { return first_scale() + groups() * scale_bytes(); }
  constexpr std::size_t first_code() const { return first_minimum() + groups() * minimum_bytes(); }
  constexpr std::size_t span_bytes() const { return first_code() + groups() * code_bytes(); }
};

constexpr Format format_of(PackedType type) {
  using enum PackedType;
  switch (type) {
    case none:
      break;
    case q4_0:
      return {4, 32, Scales::halves, false, 8, Table::none, 18};
    case q4_1:
      return {4, 32, Scales::halves, true, 0, Table::none, 20};
    case q5_0:
      return {5, 32, Scales::halves, false, 16, Table::none, 22};
    case q5_1:
      return {5, 32, Scales::halves, true, 0, Table::none, 24};
    case q8_0:
      return {8, 32, Scales::halves, false, 128, Table::none, 34};
    case q2_k:
      return {4, 16, Scales::bytes, true, 0, Table::none, 84};
    case q3_k:
      return {4, 16, Scales::integers, false, 4, Table::none, 110};
    case q4_k:
      return {4, 32, Scales::bytes, true, 0, Table::none, 144};
    case q5_k:
      return {5, 32, Scales::bytes, true, 0, Table::none, 176};
    case q6_k:
      return {6, 16, Scales::integers, false, 32, Table::none, 210};
    case iq4_nl:
      return {4, 32, Scales::halves, false, 128, Table::iq4, 18};
    case iq4_xs:
      return {4, 32, Scales::integers, false, 128, Table::iq4, 136};
    case mxfp4:
      return {4, 32, Scales::powers, false, 16, Table::fp4, 17};
    case i4_32:
      return {4, 32, Scales::floats, true, 0, Table::none, 22};
    case i4_128:
      return {4, 128, Scales::floats, true, 0, Table::none, 70};
    case i8_32:
      return {8, 32, Scales::floats, true, 0, Table::none, 38};
    case i8_128:
      return {8, 128, Scales::floats, true, 0, Table::none, 134};
    case f8_128:
      return {8, 128, Scales::floats, false, 0, Table::fp8, 132};
  }
  return {};
}

struct PackedMatrix {
  std::uint8_t* panels = nullptr;
  std::size_t num_out = 0;
  std::size_t num_in = 0;  // a multiple of 32; what is missing in the last block is zeros
  PackedType type = PackedType::none;

  Format format() const { return format_of(type); }
  bool is_float8() const { return format().is_float8(); }
  std::size_t num_panels() const { return (num_out + kPanel - 1) / kPanel; }
  std::size_t panel_bytes() const { return (num_in + format().span() - 1) / format().span() * format().span_bytes(); }
  std::size_t num_bytes() const { return num_panels() * panel_bytes(); }
  const std::uint8_t* panel(std::size_t number) const { return panels + number * panel_bytes(); }
  // Bytes of a row of a file.
  std::size_t row_bytes() const { return (num_in + format().block() - 1) / format().block() * format().block_bytes; }

  // A row of a file becomes column `at`.
  void pack(const std::uint8_t* row, std::size_t at);
  // Up to 16 rows of numbers become columns from `at` on, a multiple of 16, rounded: q4_1 or q8_0.
  void round(const bf16* rows, std::size_t num_rows, std::size_t at);
  // What was packed as column `at`, as floats [in].
  void unpack(std::size_t at, float* to) const;
};

// Memory that is asked for while a panel is multiplied: `step` further for each line of the panel.
struct LinesAhead {
  const std::uint8_t* bytes;
  std::size_t step;
};

// Rows that go over a panel together.
constexpr int kPackedRowsAtOnce = 4;
// Rows that go over the panels of a unit together: what is put of a row follows its panels in their order, and rows of
// two blocks are never mixed.
constexpr int kBlockRows = 64;

// The products of up to kPackedRowsAtOnce rows with a panel. `row`: the first, a multiple of kPackedRowsAtOnce.
void multiply_packed(const PackedMatrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                     LinesAhead ahead, float (*sums)[kPanel]);

// The same for a matrix of floats of 8 bits, of up to kBlockRows rows: a panel is widened once for all of them, and
// inputs are bf16. `row`: a multiple of 16.
void multiply_float8(const PackedMatrix& matrix, std::size_t panel, const Rows& rows, int row, int count,
                     float (*sums)[kPanel]);

#if defined(__AMX_BF16__)
// The values of 16 columns of a panel from `first` on, rounded to bf16: a word of each for two inputs, and kPanel words
// further one for the next two.
void widen_packed(const PackedMatrix& matrix, std::size_t panel, int first, std::uint32_t* to);
#endif

}  // namespace eventlm
