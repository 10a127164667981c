// Products of activations [rows, in] with a packed matrix: of bf16 in float32 sums, of int8 in exact ones of int32, of
// codes in both (packed_product.cpp).
//
// A sum runs over the input from its beginning to its end in one accumulator, whatever the number of rows and threads:
// a row's result does not depend on its neighbours, as long as the same instructions are used (AMX rounds otherwise).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "matrix.h"
#if defined(__AVX512F__)
#include "panel_wide.h"
#else
#include "panel_narrow.h"
#endif
#include "rows.h"
#include "team.h"
#include "tiles.h"
#include "vec.h"

namespace eventlm {

#if defined(__AMX_BF16__)

// Words of a panel that are multiplied by one group of inputs.
constexpr std::size_t kGroupWords = kTileInputs / 2 * kPanel;
// Groups of inputs after which other rows have their turn: the weights of that many stay in the first cache.
constexpr std::size_t kGroupsAtOnce = 8;
// How far ahead of the product memory is asked for weights that are used once.
constexpr std::size_t kGroupsAhead = 2;
// Rows of two tiles.
constexpr int kWideRows = 2 * kTileRows;

// A block's sums with one panel, and how many of its rows have been put.
template <class Numbers, class Put>
class BlockSums {
 public:
  explicit BlockSums(Put& put) : put_(put) {}

  float* row(int number) { return values_ + number * kPanel; }
  void set(int first, int count, std::size_t panel, std::size_t num_groups) {
    first_ = first, count_ = count, panel_ = panel, done_ = 0;
    at_once_ = (kWideRows + static_cast<int>(num_groups) - 1) / static_cast<int>(num_groups);
  }
  // For each group of inputs that is multiplied for 32 rows.
  EVENTLM_INLINE void put_some() { put_until(std::min(done_ + at_once_, count_)); }
  EVENTLM_INLINE void put_rest() { put_until(count_); }

 private:
  EVENTLM_INLINE void put_until(int end) {
    for (; done_ < end; done_++) {
      const float* sums = row(done_);
      put_(first_ + done_, panel_, load<typename Numbers::Sums>(sums), load<typename Numbers::Sums>(sums + kLanes));
    }
  }

  // Of either kind.
  alignas(64) float values_[kBlockRows * kPanel];
  Put& put_;
  int first_ = 0, count_ = 0, done_ = 0, at_once_ = 0;
  std::size_t panel_ = 0;
};

// Adds the products of up to 32 rows with the groups [begin, end) to their sums. Tiles are multiplied beside the vector
// units, which put the sums before these meanwhile. If IS_AHEAD, memory is asked for the weights that follow.
template <class Numbers, bool IS_WIDE, bool IS_AHEAD, class Put>
EVENTLM_INLINE void add_groups(const std::uint32_t* panel, const Rows& rows, int row, std::size_t begin,
                               std::size_t end, float* sums, BlockSums<Numbers, Put>& before) {
  const std::uint32_t* inputs = rows.row(row) + begin * kTileRows * kLanes;
  const std::size_t second = rows.tile_words;
  begin == 0 ? zero_sums<IS_WIDE>() : load_sums<IS_WIDE>(sums, kPanel);
  for (std::size_t group = begin; group < end; group++, inputs += kTileRows * kLanes) {
    const std::uint32_t* weights = panel + group * kGroupWords;
    add_products<IS_WIDE, std::is_same_v<Numbers, Integers>>(inputs, inputs + second, kLanes, weights, weights + kLanes,
                                                             kPanel);
    if constexpr (IS_AHEAD) {
      for (std::size_t word = 0; word < kGroupWords; word += kLanes) {
        __builtin_prefetch(weights + kGroupsAhead * kGroupWords + word, 0, 2);
      }
    }
    before.put_some();
  }
  store_sums<IS_WIDE>(sums, kPanel);
}

// A block of rows with one panel.
template <class Numbers, class Put>
void multiply_block(const std::uint32_t* panel, const Rows& rows, int first, int count, BlockSums<Numbers, Put>& sums,
                    BlockSums<Numbers, Put>& before) {
  const std::size_t num_groups = rows.num_groups;
  if (count <= kTileRows) {
    add_groups<Numbers, false, true>(panel, rows, first, 0, num_groups, sums.row(0), before);
  } else if (count <= kWideRows) {
    add_groups<Numbers, true, true>(panel, rows, first, 0, num_groups, sums.row(0), before);
  } else {
    for (std::size_t group = 0; group < num_groups; group += kGroupsAtOnce) {
      const std::size_t end = std::min(group + kGroupsAtOnce, num_groups);
      add_groups<Numbers, true, false>(panel, rows, first, group, end, sums.row(0), before);
      if (count - kWideRows > kTileRows) {
        add_groups<Numbers, true, false>(panel, rows, first + kWideRows, group, end, sums.row(kWideRows), before);
      } else {
        add_groups<Numbers, false, false>(panel, rows, first + kWideRows, group, end, sums.row(kWideRows), before);
      }
    }
  }
}

template <class Numbers, class Put>
void multiply_tiles(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                    Put&& put) {
  BlockSums<Numbers, Put> even(put), odd(put);
  BlockSums<Numbers, Put>*sums = &even, *before = &odd;
  configure_tiles();
  for (int row = first; row < last; row += kBlockRows) {
    const int count = std::min(kBlockRows, last - row);
    for (std::size_t panel = begin; panel < end; panel++) {
      multiply_block(matrix.panel(panel), rows, row, count, *sums, *before);
      before->put_rest();
      sums->set(row, count, panel, rows.num_groups);
      std::swap(sums, before);
    }
  }
  before->put_rest();
}

#endif

// Products with codes.
struct Codes {
  // From how many rows on tiles are faster than vectors, which need no time to take codes of 8 bits apart, but multiply
  // floats at half of the speed.
  static int tiles_from_rows(const PackedMatrix& matrix) {
    return matrix.is_float8() ? 16 : matrix.format().bits > 5 ? 40 : 32;
  }
};

// How far ahead of the product of a single pass memory is asked for.
constexpr std::size_t kBytesAhead = 6144;

// The rows [first, last), of one block, times the panels [begin, end); as in multiply_vectors, each of several passes
// asks for its part of the next panel.
template <class Put>
void multiply_codes(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                    Put&& put) {
  alignas(64) float sums[2][kBlockRows][kPanel];
  const int at_once = matrix.has_gate ? 2 : 1, num_rows = last - first;
  for (std::size_t panel = begin; panel < end; panel += at_once) {
    const PackedMatrix* part = matrix.parts;
    std::size_t number = panel / at_once;
    for (; !matrix.has_gate && number >= part->num_panels(); part++) number -= part->num_panels();
    for (int i = 0; i < at_once; i++) {
      if (part[i].is_float8()) multiply_float8(part[i], number, rows, first, num_rows, sums[i]);
    }
    for (int row = first; row < last; row += kPackedRowsAtOnce) {
      const int count = std::min(kPackedRowsAtOnce, last - row);
      for (int i = 0; i < at_once; i++) {
        if (part[i].is_float8()) continue;
        const std::size_t panel_bytes = part[i].panel_bytes();
        const std::uint8_t* bytes = part[i].panel(number);
        LinesAhead ahead{bytes + kBytesAhead, kLineBytes};
        if (num_rows > kPackedRowsAtOnce) {
          ahead = {bytes + panel_bytes + panel_bytes * (row - first) / num_rows, kLineBytes * count / num_rows};
        }
        multiply_packed(part[i], number, rows, row, count, ahead, sums[i] + (row - first));
      }
      for (int r = 0; r < count; r++) {
        for (int i = 0; i < at_once; i++) {
          const float *left = sums[0][row - first + r] + i * kLanes,
                      *right = matrix.has_gate ? sums[1][row - first + r] + i * kLanes : left + kLanes;
          put(row + r, panel + i, load<f32x16>(left), load<f32x16>(right));
        }
      }
    }
  }
}

#if defined(__AMX_BF16__)

// Bytes of the buffer, on the stack, that codes are widened into.
constexpr std::size_t kWidenedBytes = 1 << 20;

// Widens the panels [begin, end) of codes to bf16.
inline void widen(const Matrix& matrix, std::size_t begin, std::size_t end, Matrix& to) {
  std::uint32_t* words = to.panels;
  for (std::size_t panel = begin; panel < end; panel++, words += to.panel_words()) {
    const PackedMatrix* part = matrix.parts;
    if (matrix.has_gate) {
      for (int half = 0; half < 2; half++) {
        widen_packed(part[half], panel / 2, panel % 2 * kLanes, words + half * kLanes);
      }
      continue;
    }
    std::size_t number = panel;
    for (; number >= part->num_panels(); part++) number -= part->num_panels();
    for (int half = 0; half < 2; half++) widen_packed(*part, number, half * kLanes, words + half * kLanes);
  }
}

// The rows [first, last) times the panels [begin, end) of codes. Where not all of these fit into kWidenedBytes, they
// are widened again for each block of rows. False if not even one does: with more than 16,384 inputs.
template <class Put>
bool multiply_widened(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                      Put&& put) {
  alignas(64) std::uint32_t words[kWidenedBytes / 4];
  Matrix wide;
  wide.panels = words;
  wide.num_in = matrix.num_in;
  const std::size_t most = kWidenedBytes / 4 / wide.panel_words();
  if (most == 0) return false;
  const int at_once = end - begin <= most ? last - first : kBlockRows;
  for (int row = first; row < last; row += at_once) {
    for (std::size_t panel = begin; panel < end; panel += most) {
      const std::size_t last_panel = std::min(panel + most, end);
      widen(matrix, panel, last_panel, wide);
      multiply_tiles<Floats>(wide, 0, last_panel - panel, rows, row, std::min(row + at_once, last),
                             [&](int own_row, std::size_t number, f32x16 left, f32x16 right) {
                               put(own_row, panel + number, left, right);
                             });
    }
  }
  return true;
}

#endif

// The rows [first, last) times the panels [begin, end).
template <class Numbers, class Put>
void multiply(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
              Put&& put) {
  if constexpr (std::is_same_v<Numbers, Codes>) {
#if defined(__AMX_BF16__)
    const bool is_for_tiles = rows.count >= Codes::tiles_from_rows(matrix.parts[0]);
    if (is_for_tiles && multiply_widened(matrix, begin, end, rows, first, last, put)) return;
#endif
    for (int row = first; row < last; row += kBlockRows) {
      multiply_codes(matrix, begin, end, rows, row, std::min(row + kBlockRows, last), put);
    }
    return;
  } else {
#if defined(__AMX_BF16__)
    if (rows.count >= Numbers::kTilesFromRows) {
      return multiply_tiles<Numbers>(matrix, begin, end, rows, first, last, put);
    }
#endif
    for (int row = first; row < last; row += kBlockRows) {
      multiply_vectors<Numbers>(matrix, begin, end, rows, row, std::min(row + kBlockRows, last), put);
    }
  }
}

// Bytes of inputs that stay in a core's second cache while panels go by, and of the panels beside them.
constexpr std::size_t kInputBytesAtOnce = 3 << 19;
constexpr std::size_t kPanelBytesAtOnce = 1 << 18;

// The units of panels and rows in which members take a product, one of `num_products` alike. A unit has a multiple of
// `together` panels.
struct Units {
  Units(const Matrix& matrix, std::size_t num_rows, int num_members, std::size_t together = 1,
        std::size_t num_products = 1)
      : num_panels(matrix.num_panels()), num_rows(num_rows) {
    const std::size_t panel_bytes = matrix.num_bytes() / num_panels;
    const std::size_t most_rows = std::max<std::size_t>(kInputBytesAtOnce / (matrix.num_words() * 4), 1);
    const std::size_t num_parts = (num_rows + most_rows - 1) / most_rows;
    part = round_up((num_rows + num_parts - 1) / num_parts, kBlockRows);
    // Small enough that the members end together; with few rows large enough that taking one is nothing beside it, and
    // four panels at least (see multiply_vectors), with many few enough that they stay in the second cache.
    const bool is_many = num_rows > kBlockRows;
    const std::size_t least = is_many ? together : round_up(4, together);
    const std::size_t most = is_many ? kPanelBytesAtOnce / panel_bytes : 64;
    group = std::max(std::min(num_products * num_panels / (8 * num_members), most) / least * least, least);
    num_groups = (num_panels + group - 1) / group;
  }

  struct Unit {
    std::size_t panel, last_panel;
    int row, last_row;
  };

  std::size_t count() const { return (num_rows + part - 1) / part * num_groups; }
  // Its panels and rows.
  Unit unit(std::size_t number) const {
    const std::size_t row = number / num_groups * part, panel = number % num_groups * group;
    return {panel, std::min(panel + group, num_panels), static_cast<int>(row),
            static_cast<int>(std::min(row + part, num_rows))};
  }

  const std::size_t num_panels, num_rows;
  std::size_t part, group, num_groups;
};

// The same of a matrix of any kind: put(row, panel, left half, right half) takes the products, as floats.
template <class Put>
void multiply_any(const Matrix& matrix, std::size_t begin, std::size_t end, const Rows& rows, int first, int last,
                  Put&& put) {
  if (matrix.num_parts > 0) return multiply<Codes>(matrix, begin, end, rows, first, last, put);
  if (!matrix.is_int8) return multiply<Floats>(matrix, begin, end, rows, first, last, put);
  auto put_integers = [&](int row, std::size_t panel, i32x16 left, i32x16 right) {
    const PanelEnd& ends = matrix.end(panel);
    const f32x16 scale = splat(rows.scales[row]);
    put(row, panel, to_floats(left - ends.offsets[0]) * (scale * ends.scales[0]),
        to_floats(right - ends.offsets[1]) * (scale * ends.scales[1]));
  };
  multiply<Integers>(matrix, begin, end, rows, first, last, put_integers);
}

// put takes the products of all rows with all panels; finish() is called after the last.
template <class Put, class Finish>
void multiply_shared(Operation& operation, int num_members, const Matrix& matrix, const Rows& rows, Put&& put,
                     Finish&& finish, std::size_t together = 1) {
  const Units units(matrix, rows.count, num_members, together);
  auto multiply_unit = [&](std::size_t number) {
    const Units::Unit unit = units.unit(number);
    multiply_any(matrix, unit.panel, unit.last_panel, rows, unit.row, unit.last_row, put);
  };
  operation.share(units.count(), 1, multiply_unit, finish);
}

}  // namespace eventlm
