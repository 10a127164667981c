#include "products.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace eventlm {

namespace {

// Rows of a matrix that a member packs, and of inputs that it takes.
constexpr std::size_t kRowsPackedAtOnce = kPanel, kRowsTakenAtOnce = 4;
// Numbers that a member takes of what is soon done; and of which so many are sooner done than others come to help.
constexpr std::size_t kNumbersAtOnce = 1 << 12, kMostAlone = 1 << 15;

// Two halves of a panel's products.
EVENTLM_INLINE void put_panel(const Product& product, int row, std::size_t panel, f32x16 left, f32x16 right) {
  const std::size_t first = panel * kPanel, count = std::min<std::size_t>(kPanel, product.num_out - first);
  if (product.bias != nullptr) {
    left += load<f32x16>(product.bias + first), right += load<f32x16>(product.bias + first + kLanes);
  }
  bf16* to = product.out + row * product.num_out + first;
  if (count == kPanel) {
    store_bf16(to, left);
    store_bf16(to + kLanes, right);
    return;
  }
  bf16 some[kPanel];
  store_bf16(some, left);
  store_bf16(some + kLanes, right);
  std::copy_n(some, count, to);
}

}  // namespace

void Products::pack(Matrix matrix, const bf16* rows, std::size_t first_row, std::size_t num_rows) {
  Operation packing;
  team_.run([&] {
    packing.share(num_rows, kRowsPackedAtOnce,
                  [&](std::size_t row) { matrix.pack(rows + row * matrix.num_in, first_row + row); });
  });
}

void Products::multiply(const std::vector<Product>& products, std::size_t num_in, const bf16* inputs, int num_rows) {
  rows_.reserve(num_rows);
  if (operations_.size() < products.size()) operations_ = std::vector<Operation>(products.size());
  for (Operation& operation : operations_) operation.reset();
  const std::size_t whole = num_in / kLanes * kLanes;
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
  Operation taking;
  team_.run([&] {
    taking.share(num_rows, kRowsTakenAtOnce, take_row);
    const Rows rows = rows_.rows(num_rows, num_in);
    for (std::size_t number = 0; number < products.size(); number++) {
      const Product& product = products[number];
      auto put = [&product](int row, std::size_t panel, f32x16 left, f32x16 right) {
        put_panel(product, row, panel, left, right);
      };
      Matrix matrix;
      matrix.num_out = product.num_out, matrix.num_in = num_in;
      matrix.set_memory(product.memory);
      multiply_shared(operations_[number], team_.size(), matrix, rows, put, [] {});
    }
  });
}

template <class Work>
void Products::share_small(std::size_t count, std::size_t size, Work&& work) {
  Operation operation;
  auto work_all = [&] { operation.share(count, std::max<std::size_t>(kNumbersAtOnce / size, 1), work); };
  if (count * size <= kMostAlone) {
    work_all();
  } else {
    // By reference: a copy in a std::function would be on the heap, and callers do not expect std::bad_alloc.
    team_.run(std::ref(work_all));
  }
}

void Products::norm(const bf16* x, std::size_t num_rows, std::size_t size, const float* weight, float eps, bf16* out) {
  auto norm_row = [=](std::size_t row) {
    const bf16* from = x + row * size;
    bf16* to = out + row * size;
    f32x16 squares = {};
    for (std::size_t i = 0; i < size; i += kLanes) {
      const f32x16 values = load_bf16(from + i);
      squares += values * values;
    }
    const float scale = 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(size) + eps);
    for (std::size_t i = 0; i < size; i += kLanes) {
      store_bf16(to + i, load_bf16(from + i) * scale * load<f32x16>(weight + i));
    }
  };
  share_small(num_rows, size, norm_row);
}

void Products::rotate(const Heads& heads, std::size_t num_tokens, int num_heads, int head_dim, const bf16* cosines,
                      const bf16* sines, bf16* out) {
  const int half = head_dim / 2;
  auto rotate_token = [=](std::size_t token) {
    const bf16 *cosine = cosines + token * head_dim, *sine = sines + token * head_dim;
    for (int head = 0; head < num_heads; head++) {
      const bf16* from = heads.at(token, head);
      bf16* to = out + (token * num_heads + head) * head_dim;
      int i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const f32x16 first = load_bf16(from + i), second = load_bf16(from + half + i);
        store_bf16(to + i, first * load_bf16(cosine + i) - second * load_bf16(sine + i));
        store_bf16(to + half + i, second * load_bf16(cosine + half + i) + first * load_bf16(sine + half + i));
      }
      for (; i < half; i++) {
        const float first = to_float(from[i]), second = to_float(from[half + i]);
        to[i] = to_bf16(first * to_float(cosine[i]) - second * to_float(sine[i]));
        to[half + i] = to_bf16(second * to_float(cosine[half + i]) + first * to_float(sine[half + i]));
      }
    }
  };
  const std::size_t token_size = static_cast<std::size_t>(num_heads) * head_dim;
  share_small(num_tokens, token_size, rotate_token);
}

}  // namespace eventlm
