// Activations [rows, in] in bf16 or int8, as products take them.
//
// 16 rows by 32 inputs, of int8 by 64, lie together, in 16 lines of 64 bytes: what a tile of AMX loads. In rows of
// their own, a power of two apart, they would fall into the same few places of the first cache.
//
// For matrices of codes (packed.h) there are besides those of bf16 lines of int8 without a rotation. Behind 128 inputs
// of 16 rows, twice 16 lines, lie 16 lines of their scales.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quantize.h"
#include "vec.h"

namespace eventlm {

// Rows of a tile, and inputs of its row.
constexpr int kTileRows = 16;
constexpr int kTileInputs = 32;
// Output columns of weights that lie together.
constexpr int kPanel = 32;

inline std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

struct alignas(64) Line {
  std::uint32_t words[kLanes];
};

constexpr std::size_t kPackedInputs = 128;
constexpr std::size_t kPackedLines = 3;

// Of 128 inputs of a row: the scale of each 32, a NaN if one of them is not finite, and what 32 and 16 integers add up
// to, with the other sign.
struct alignas(64) PackedScale {
  float scales[4];
  std::int32_t of_32[4];
  std::int32_t of_16[8];
};

enum class Inputs { bf16, int8, packed };

struct Rows {
  const std::uint32_t* words;
  std::size_t num_groups;  // lines of a row
  int count;
  std::size_t tile_words;
  const float* scales;  // of each row of int8
  const Line* packed;
  std::size_t packed_tile;  // lines of 16 rows

  // The first line of a row; the next is 16 lines further.
  const std::uint32_t* row(std::size_t number) const {
    return words + number / kTileRows * tile_words + number % kTileRows * kLanes;
  }
  const Line* packed_row(std::size_t number) const {
    return packed + number / kTileRows * packed_tile + number % kTileRows;
  }
};

// Memory for some rows. What follows the inputs that are put is always a number, and weights are 0
// there.
class RowBuffer {
 public:
  // For rows of up to `most_inputs`.
  RowBuffer(std::size_t most_inputs, Inputs inputs)
      : inputs_(inputs),
        num_groups_(groups_of(most_inputs)),
        packed_tile_(round_up(most_inputs, kPackedInputs) / kPackedInputs * kPackedLines * kTileRows) {}

  void reserve(std::size_t num_rows) {
    const std::size_t num_tiles = round_up(num_rows, kTileRows) / kTileRows;
    if (lines_.size() < num_tiles * kTileRows * num_groups_) lines_.resize(num_tiles * kTileRows * num_groups_);
    if (inputs_ == Inputs::int8 && scales_.size() < num_rows) scales_.resize(num_rows);
    if (inputs_ == Inputs::packed && packed_.size() < num_tiles * packed_tile_)
      packed_.resize(num_tiles * packed_tile_);
  }

  // 16 inputs of a row, from a multiple of 16 on.
  EVENTLM_INLINE void put(std::size_t row, std::size_t input, f32x16 values) {
    store_bf16(reinterpret_cast<bf16*>(&line(row, input / kTileInputs)) + input % kTileInputs, values);
  }

  // A row of another, as it is, for as many inputs.
  void copy(std::size_t row, const RowBuffer& other, std::size_t other_row) {
    for (std::size_t number = 0; number < num_groups_; number++) line(row, number) = other.line(other_row, number);
    if (inputs_ == Inputs::int8) scales_[row] = other.scales_[other_row];
    for (std::size_t number = 0; inputs_ == Inputs::packed && number < packed_tile_; number += kTileRows) {
      packed_line(row, number) = other.packed_line(other_row, number);
    }
  }

  bool is_quantized() const { return inputs_ != Inputs::bf16; }

  // Makes int8 of a row, if this is for such, once all of its inputs have been put.
  void quantize(std::size_t row, std::size_t num_inputs) {
    if (inputs_ == Inputs::int8) quantize_in_place(row, num_inputs);
    if (inputs_ == Inputs::packed) quantize_beside(row, num_inputs);
  }

  Rows rows(int count, std::size_t num_inputs) const {
    const std::size_t num_groups = groups_of(num_inputs);
    return {lines_[0].words, inputs_ == Inputs::int8 ? num_groups / 2 : num_groups,
            count,           num_groups_ * kTileRows * kLanes,
            scales_.data(),  packed_.data(),
            packed_tile_};
  }

 private:
  // 64 inputs in a line: one has been read when it is written.
  void quantize_in_place(std::size_t row, std::size_t num_inputs) {
    const std::size_t num_blocks = groups_of(num_inputs) / 2;
    f32x16 largest = {}, nothing = {};
    for (std::size_t number = 0; number < num_blocks; number++) {
      f32x16 block[kBlock / kLanes];
      get(row, number, round_up(num_inputs, kLanes), block);
      rotate(block);
      for (int part = 0; part < kBlock / kLanes; part++) {
        put(row, number * kBlock + part * kLanes, block[part]);
        largest = vmax(largest, magnitude(block[part]));
      }
    }
    const Scale scale(max_of(largest), kInt8Max);
    for (std::size_t number = 0; number < num_blocks; number++) {
      for (int part = 0; part < kBlock / kLanes; part++) {
        const bf16* from = reinterpret_cast<const bf16*>(&line(row, 2 * number + part / 2)) + part % 2 * kLanes;
        const f32x16 values = load_bf16(from);
        const i32x16 integers = to_int(values * scale.inverse) + kInputOffset;
        store(reinterpret_cast<std::uint8_t*>(&line(row, number)) + part * kLanes,
              __builtin_convertvector(integers, u8x16));
        nothing += values * 0.0f;  // a NaN where a value is not finite
      }
    }
    scales_[row] = scale.step + sum_of(nothing);
  }

  void quantize_beside(std::size_t row, std::size_t num_inputs) {
    Line* to = &packed_line(row, 0);
    for (std::size_t first = 0; first < num_inputs; first += kPackedInputs, to += kPackedLines * kTileRows) {
      PackedScale end = {};
      for (std::size_t number = 0; number < kPackedInputs / kTileInputs; number++) {
        const std::size_t input = first + number * kTileInputs;
        const bf16* from = reinterpret_cast<const bf16*>(&line(row, input / kTileInputs));
        f32x16 halves[2] = {};
        for (int half = 0; half < 2; half++) {
          if (input + half * kLanes < num_inputs) halves[half] = load_bf16(from + half * kLanes);
        }
        const Scale scale(max_of(vmax(magnitude(halves[0]), magnitude(halves[1]))), kInt8Max);
        end.scales[number] = scale.step + sum_of(halves[0] * 0.0f + halves[1] * 0.0f);
        for (int half = 0; half < 2; half++) {
          const i8x16 integers = __builtin_convertvector(to_int(halves[half] * scale.inverse), i8x16);
          store(reinterpret_cast<std::int8_t*>(to + number / 2 * kTileRows) + number % 2 * kTileInputs + half * kLanes,
                integers);
          const std::int32_t minus_sum = -sum_of(__builtin_convertvector(integers, i32x16));
          end.of_16[2 * number + half] = minus_sum;
          end.of_32[number] += minus_sum;
        }
      }
      store(to + 2 * kTileRows, end);
    }
  }

  std::size_t place(std::size_t row, std::size_t number) const {
    return (row / kTileRows * num_groups_ + number) * kTileRows + row % kTileRows;
  }
  Line& line(std::size_t row, std::size_t number) { return lines_[place(row, number)]; }
  const Line& line(std::size_t row, std::size_t number) const { return lines_[place(row, number)]; }
  // `first`: how many lines of 16 rows come before.
  std::size_t packed_place(std::size_t row, std::size_t first) const {
    return row / kTileRows * packed_tile_ + first + row % kTileRows;
  }
  Line& packed_line(std::size_t row, std::size_t first) { return packed_[packed_place(row, first)]; }
  const Line& packed_line(std::size_t row, std::size_t first) const { return packed_[packed_place(row, first)]; }

  std::size_t groups_of(std::size_t num_inputs) const {
    return round_up(num_inputs, inputs_ == Inputs::int8 ? kBlock : kTileInputs) / kTileInputs;
  }

  // What was put of a block; zeros after it, where an earlier row may have left something.
  EVENTLM_INLINE void get(std::size_t row, std::size_t number, std::size_t end, f32x16 (&block)[kBlock / kLanes]) {
    for (int part = 0; part < kBlock / kLanes; part++) {
      const std::size_t input = number * kBlock + part * kLanes;
      const bf16* from = reinterpret_cast<const bf16*>(&line(row, input / kTileInputs)) + input % kTileInputs;
      block[part] = input < end ? load_bf16(from) : f32x16{};
    }
  }

  const Inputs inputs_;
  const std::size_t num_groups_, packed_tile_;
  std::vector<Line> lines_, packed_;
  std::vector<float> scales_;
};

}  // namespace eventlm
