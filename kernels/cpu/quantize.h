// Rows of numbers as 8-bit integers: rotated, divided by the row's largest magnitude over 127, and rounded. The scale
// of a row with a number that is not finite is a NaN, and so are its products, but not its neighbours'.
//
// A rotation by a Hadamard matrix in blocks of 64 (QuaRot, Ashkboos et al., 2024) spreads the few large activations of
// a token over their block, so that they do not leave the others a handful of integers. It is its own inverse, and a
// product of two rotated rows is that of the rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "vec.h"

namespace eventlm {

constexpr float kInt8Max = 127.0f;
// What is added to inputs: one factor of the products is unsigned.
constexpr int kInputOffset = 128;
// Numbers that are rotated together.
constexpr int kBlock = 64;

// What a row's elements are multiples of, where its largest number becomes `most`, and its inverse. So small a number
// that the inverse could be infinite makes a row of zeros.
struct Scale {
  Scale(float largest, float most) : step(largest / most), inverse(largest > 1e-30f ? most / largest : 0.0f) {}

  float step, inverse;
};

// Each lane with the one whose number differs in the bit DISTANCE: their sum in the lower, their difference in the
// upper.
template <int DISTANCE>
EVENTLM_INLINE f32x16 add_lanes(f32x16 x) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const f32x16 signed_x = (f32x16)((u32x16)x ^ ((u32x16)(lanes & DISTANCE) * (0x80000000u / DISTANCE)));
  return exchange_lanes<DISTANCE>(x) + signed_x;
}

EVENTLM_INLINE void rotate(f32x16 (&x)[kBlock / kLanes]) {
  for (f32x16& part : x) part = add_lanes<8>(add_lanes<4>(add_lanes<2>(add_lanes<1>(part))));
  const f32x16 a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  x[0] = (a + c) * 0.125f;
  x[1] = (b + d) * 0.125f;
  x[2] = (a - c) * 0.125f;
  x[3] = (b - d) * 0.125f;
}

// Each block of x, in place; size is a multiple of kBlock.
inline void rotate_row(float* x, std::size_t size) {
  for (std::size_t i = 0; i < size; i += kBlock) {
    f32x16 block[kBlock / kLanes];
    for (int part = 0; part < kBlock / kLanes; part++) block[part] = load<f32x16>(x + i + part * kLanes);
    rotate(block);
    for (int part = 0; part < kBlock / kLanes; part++) store(x + i + part * kLanes, block[part]);
  }
}

}  // namespace eventlm
