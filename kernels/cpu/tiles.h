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
inline void configure_tiles(int first_rows = 16, int second_rows = 16) {
  TileConfig config;
  const int num_rows[8] = {first_rows, first_rows,  second_rows, second_rows,
                           first_rows, second_rows, NUM_PAIRS,   NUM_PAIRS};
  for (int tile = 0; tile < 8; tile++) {
    const bool is_input = tile == 4 || tile == 5;
    config.row_bytes[tile] = static_cast<std::uint16_t>(num_rows[tile] == 0 ? 0 : is_input ? NUM_PAIRS * 4 : 64);
    config.num_rows[tile] = static_cast<std::uint8_t>(num_rows[tile]);
  }
  // GCC 12's _tile_loadconfig tells the compiler of the first 8 bytes only.
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// GCC's _tile_loadd does not tell the compiler that it reads memory: what is to be read must be there when sums begin.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Sums of 32 or, unless IS_WIDE, 16 rows and 32 columns; `stride` in floats.
template <bool IS_WIDE>
inline void zero_sums() {
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (IS_WIDE) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <bool IS_WIDE>
inline void load_sums(const float* sums, std::size_t stride) {
  finish_stores();
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

// `sums += inputs * weights`, numbers of tiles, of bf16 or else of bytes, the inputs' unsigned.
#define EVENTLM_MULTIPLY_TILES(IS_INT8, sums, inputs, weights) \
  if constexpr (IS_INT8) {                                     \
    _tile_dpbusd(sums, inputs, weights);                       \
  } else {                                                     \
    _tile_dpbf16ps(sums, inputs, weights);                     \
  }

// Adds inputs [rows][pairs] x left and right [pairs][16 words], `first` the inputs of 16 rows and `second` of the next;
// strides in words.
template <bool IS_WIDE, bool IS_INT8 = false>
inline void add_products(const std::uint32_t* first, const std::uint32_t* second, std::size_t input_stride,
                         const std::uint32_t* left, const std::uint32_t* right, std::size_t stride) {
  _tile_loadd(6, left, stride * 4);
  _tile_loadd(7, right, stride * 4);
  _tile_loadd(4, first, input_stride * 4);
  EVENTLM_MULTIPLY_TILES(IS_INT8, 0, 4, 6);
  EVENTLM_MULTIPLY_TILES(IS_INT8, 1, 4, 7);
  if constexpr (IS_WIDE) {
    _tile_loadd(5, second, input_stride * 4);
    EVENTLM_MULTIPLY_TILES(IS_INT8, 2, 5, 6);
    EVENTLM_MULTIPLY_TILES(IS_INT8, 3, 5, 7);
  }
}

}  // namespace eventlm

#endif
