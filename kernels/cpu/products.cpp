#include "products.h"

#include <algorithm>

namespace eventlm {

namespace {

// Rows of a matrix that a member packs, and of inputs that it takes.
constexpr std::size_t kRowsPackedAtOnce = kPanel, kRowsTakenAtOnce = 4;

}  // namespace

void Products::pack(Matrix matrix, const bf16* rows, std::size_t first_row, std::size_t num_rows) {
  Operation packing;
  team_.run([&] {
    packing.share(num_rows, kRowsPackedAtOnce,
                  [&](std::size_t row) { matrix.pack(rows + row * matrix.num_in, first_row + row); });
  });
}

void Products::multiply(const Matrix& matrix, const bf16* inputs, int num_rows, const float* bias, bf16* out) {
  rows_.reserve(num_rows);
  const std::size_t num_in = matrix.num_in, num_out = matrix.num_out, whole = num_in / kLanes * kLanes;
  auto take_row = [&](std::size_t row) {
    const bf16* from = inputs + row * num_in;
    for (std::size_t i = 0; i < whole; i += kLanes) rows_.put(row, i, load_bf16(from + i));
    // Zeros fill the last inputs that lie together, where a wider matrix may have left something.
    for (std::size_t i = whole; i < round_up(num_in, kTileInputs); i += kLanes) {
      bf16 last[kLanes] = {};
      if (i < num_in) std::copy_n(from + i, num_in - i, last);
      rows_.put(row, i, load_bf16(last));
    }
  };
  auto put = [=](int row, std::size_t panel, f32x16 left, f32x16 right) {
    const std::size_t first = panel * kPanel, count = std::min<std::size_t>(kPanel, num_out - first);
    if (bias != nullptr) left += load<f32x16>(bias + first), right += load<f32x16>(bias + first + kLanes);
    bf16* to = out + row * num_out + first;
    if (count == kPanel) {
      store_bf16(to, left);
      store_bf16(to + kLanes, right);
      return;
    }
    bf16 some[kPanel];
    store_bf16(some, left);
    store_bf16(some + kLanes, right);
    std::copy_n(some, count, to);
  };
  Operation taking, products;
  team_.run([&] {
    taking.share(num_rows, kRowsTakenAtOnce, take_row);
    multiply_shared(products, team_.size(), matrix, rows_.rows(num_rows, num_in), put, [] {});
  });
}

}  // namespace eventlm
