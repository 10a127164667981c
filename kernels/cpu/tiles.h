// The tiles of AMX, as products use them: 0 to 3 are sums (2 x 16 rows, 2 x 16 columns), 4 and 5 the rows' inputs, 6
// and 7 what they are multiplied by.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

namespace eventlm {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t num_rows[16] = {};
};

// For the first 16 rows and the next; NUM_PAIRS pairs of bf16 are multiplied at once.
template <int NUM_PAIRS = 16>
inline void configure_tiles(int first_rows, int second_rows) {
  TileConfig config;
  const int num_rows[8] = {first_rows, first_rows,  second_rows, second_rows,
                           first_rows, second_rows, NUM_PAIRS,   NUM_PAIRS};
  for (int tile = 0; tile < 8; tile++) {
    const bool is_input = tile == 4 || tile == 5;
    config.row_bytes[tile] = static_cast<std::uint16_t>(num_rows[tile] == 0 ? 0 : is_input ? NUM_PAIRS * 4 : 64);
    config.num_rows[tile] = static_cast<std::uint8_t>(num_rows[tile]);
  }
  _tile_loadconfig(&config);
}

// Sums of 32 or, unless IS_WIDE, 16 rows and 32 columns; `stride` in floats.
template <bool IS_WIDE>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (IS_WIDE) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool IS_WIDE>
inline void load_sums(const float* sums, std::size_t stride) {
  _tile_loadd(0, sums, stride * 4);
  _tile_loadd(1, sums + 16, stride * 4);
  if constexpr (IS_WIDE) {
    _tile_loadd(2, sums + 16 * stride, stride * 4);
    _tile_loadd(3, sums + 16 * stride + 16, stride * 4);
  }
}

template <bool IS_WIDE>
inline void store_sums(float* sums, std::size_t stride) {
  _tile_stored(0, sums, stride * 4);
  _tile_stored(1, sums + 16, stride * 4);
  if constexpr (IS_WIDE) {
    _tile_stored(2, sums + 16 * stride, stride * 4);
    _tile_stored(3, sums + 16 * stride + 16, stride * 4);
  }
}

// Adds inputs [rows][pairs] x left and right [pairs][16 words]; strides in words.
template <bool IS_WIDE>
inline void add_products(const std::uint32_t* inputs, std::size_t input_stride, const std::uint32_t* left,
                         const std::uint32_t* right, std::size_t stride) {
  _tile_loadd(6, left, stride * 4);
  _tile_loadd(7, right, stride * 4);
  _tile_loadd(4, inputs, input_stride * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (IS_WIDE) {
    _tile_loadd(5, inputs + 16 * input_stride, input_stride * 4);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

}  // namespace eventlm

#endif
