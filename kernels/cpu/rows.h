// Activations [rows, in] in bf16 or int8, as products take them.
//
// 16 rows by 32 inputs, of int8 by 64, lie together, in 16 lines of 64 bytes: what a tile of AMX loads. In rows of
// their own, a power of two apart, they would fall into the same few places of the first cache.
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

inline std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

struct alignas(64) Line {
  std::uint32_t words[kLanes];
};

struct Rows {
  const std::uint32_t* words;
  std::size_t num_groups;  // lines of a row
  int count;
  std::size_t tile_words;
  const float* scales;  // of each row of int8

  // The first line of a row; the next is 16 lines further.
  const std::uint32_t* row(std::size_t number) const {
    return words + number / kTileRows * tile_words + number % kTileRows * kLanes;
  }
};

// Memory for some rows. What follows the inputs that are put is always a number, and weights are 0
// there.
class RowBuffer {
 public:
  RowBuffer(std::size_t num_inputs, bool is_int8)
      : num_inputs_(round_up(num_inputs, kLanes)),
        num_groups_(round_up(num_inputs, is_int8 ? kBlock : kTileInputs) / kTileInputs),
        is_int8_(is_int8) {}

  void reserve(std::size_t num_rows) {
    const std::size_t size = round_up(num_rows, kTileRows) * num_groups_;
    if (lines_.size() < size) lines_.resize(size);
    if (is_int8_ && scales_.size() < num_rows) scales_.resize(num_rows);
  }

  // 16 inputs of a row, from a multiple of 16 on.
  EVENTLM_INLINE void put(std::size_t row, std::size_t input, f32x16 values) {
    store_bf16(reinterpret_cast<bf16*>(&line(row, input / kTileInputs)) + input % kTileInputs, values);
  }

  bool is_int8() const { return is_int8_; }

  // Makes int8 of a row, if this is for such, once all of it has been put; 64 inputs in a line. In its place: a line
  // has been read when it is written.
  void quantize(std::size_t row) {
    if (!is_int8_) return;
    f32x16 largest = {}, nothing = {};
    for (std::size_t number = 0; number < num_groups_ / 2; number++) {
      f32x16 block[kBlock / kLanes];
      get(row, number, block);
      rotate(block);
      for (int part = 0; part < kBlock / kLanes; part++) {
        put(row, number * kBlock + part * kLanes, block[part]);
        largest = vmax(largest, magnitude(block[part]));
      }
    }
    const Scale scale(max_of(largest), kInt8Max);
    for (std::size_t number = 0; number < num_groups_ / 2; number++) {
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

  Rows rows(int count) const {
    return {lines_[0].words, is_int8_ ? num_groups_ / 2 : num_groups_, count, num_groups_ * kTileRows * kLanes,
            scales_.data()};
  }

 private:
  Line& line(std::size_t row, std::size_t number) {
    return lines_[(row / kTileRows * num_groups_ + number) * kTileRows + row % kTileRows];
  }

  // What was put of a block; zeros after it, where an earlier row may have left something.
  EVENTLM_INLINE void get(std::size_t row, std::size_t number, f32x16 (&block)[kBlock / kLanes]) {
    for (int part = 0; part < kBlock / kLanes; part++) {
      const std::size_t input = number * kBlock + part * kLanes;
      const bf16* from = reinterpret_cast<const bf16*>(&line(row, input / kTileInputs)) + input % kTileInputs;
      block[part] = input < num_inputs_ ? load_bf16(from) : f32x16{};
    }
  }

  const std::size_t num_inputs_, num_groups_;
  const bool is_int8_;
  std::vector<Line> lines_;
  std::vector<float> scales_;
};

}  // namespace eventlm
