#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace eventlm {

namespace {

constexpr std::size_t kHugePage = 2 << 20;
// Rows of a matrix that a thread packs at a time.
constexpr std::size_t kRowsPackedAtOnce = kPanel;

}  // namespace

Weights::Weights(const Shape& shape, bool is_int8) : layers(shape.num_layers), shape_(shape) {
  const std::size_t hidden = shape.hidden_size, inner = shape.intermediate_size;
  const std::size_t heads = static_cast<std::size_t>(shape.num_heads) * shape.head_dim;
  const std::size_t all_heads = static_cast<std::size_t>(shape.num_heads) + 2 * shape.num_kv_heads;
  std::vector<Matrix*> matrices;
  auto shaped = [&](Matrix& matrix, std::size_t num_out, std::size_t num_in) {
    matrix.num_out = num_out;
    matrix.num_in = num_in;
    matrix.is_int8 = is_int8;
    arena_bytes_ += round_up(matrix.num_bytes(), 64);
    matrices.push_back(&matrix);
  };
  for (Layer& layer : layers) {
    shaped(layer.qkv, all_heads * round_up(shape.head_dim, kPanel), hidden);
    shaped(layer.output, hidden, heads);
    // Gate and up share panels, half and half.
    shaped(layer.gate_up, 2 * round_up(inner, 16), hidden);
    shaped(layer.down, hidden, inner);
  }
  shaped(lm_head, shape.vocab_size, hidden);
  arena_bytes_ = round_up(arena_bytes_, kHugePage) + kHugePage;
  arena_ = mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arena_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(arena_, arena_bytes_, MADV_HUGEPAGE);
#endif
  auto at = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(arena_), kHugePage));
  for (Matrix* matrix : matrices) {
    matrix->panels = reinterpret_cast<std::uint32_t*>(at);
    at += round_up(matrix->num_bytes(), 64);
  }
}

Weights::~Weights() { munmap(arena_, arena_bytes_); }

void Weights::load_matrix(Team& team, Weight weight, int layer_number, const bf16* rows, std::size_t first_row,
                          std::size_t num_rows) {
  const std::size_t head_columns = round_up(shape_.head_dim, kPanel);
  const std::size_t first_key = shape_.num_heads * head_columns;
  const std::size_t first_value = first_key + shape_.num_kv_heads * head_columns;
  Matrix* matrix = nullptr;
  std::size_t first = 0;
  Columns columns = Columns::plain;
  auto to = [&](Matrix& m, std::size_t offset = 0, Columns where = Columns::plain) {
    matrix = &m, first = offset, columns = where;
  };
  if (weight == Weight::lm_head || weight == Weight::embedding) {
    to(lm_head);
  } else {
    Layer& layer = layers[layer_number];
    switch (weight) {
      case Weight::query:
        to(layer.qkv, 0, Columns::heads);
        break;
      case Weight::key:
        to(layer.qkv, first_key, Columns::heads);
        break;
      case Weight::value:
        to(layer.qkv, first_value, Columns::heads);
        break;
      case Weight::output:
        to(layer.output);
        break;
      case Weight::gate:
        to(layer.gate_up, 0, Columns::gate);
        break;
      case Weight::up:
        to(layer.gate_up, 0, Columns::up);
        break;
      case Weight::down:
        to(layer.down);
        break;
      default:
        return;
    }
  }
  Operation packing;
  team.run([&] {
    packing.share((num_rows + kRowsPackedAtOnce - 1) / kRowsPackedAtOnce, 1, [&](std::size_t piece) {
      const std::size_t begin = piece * kRowsPackedAtOnce, count = std::min(kRowsPackedAtOnce, num_rows - begin);
      matrix->pack(rows + begin * matrix->num_in, first_row + begin, count, first, columns, shape_.head_dim);
    });
  });
}

void Weights::load_vector(Weight weight, int layer_number, const float* source) {
  const std::size_t heads = static_cast<std::size_t>(shape_.num_heads) * shape_.head_dim;
  const std::size_t kv_heads = static_cast<std::size_t>(shape_.num_kv_heads) * shape_.head_dim;
  const std::size_t head_columns = round_up(shape_.head_dim, kPanel);
  const std::size_t first_key = shape_.num_heads * head_columns;
  const std::size_t first_value = first_key + shape_.num_kv_heads * head_columns;
  const std::size_t all_heads = first_value + shape_.num_kv_heads * head_columns;
  auto all = [&](Aligned<float>& to, std::size_t size) {
    to.assign(round_up(size, kPanel), 0.0f);
    std::copy_n(source, size, to.data());
  };
  auto part = [&](Aligned<float>& to, std::size_t whole, std::size_t size, std::size_t first, Columns columns) {
    to.resize(round_up(whole, kPanel));
    for (std::size_t i = 0; i < size; i++) to[first + Matrix::column(columns, i, shape_.head_dim)] = source[i];
  };
  if (weight == Weight::final_norm) return all(final_norm, shape_.hidden_size);
  Layer& layer = layers[layer_number];
  const std::size_t inner = shape_.intermediate_size, both = 2 * round_up(inner, 16);
  switch (weight) {
    case Weight::input_norm:
      return all(layer.input_norm, shape_.hidden_size);
    case Weight::post_attention_norm:
      return all(layer.post_attention_norm, shape_.hidden_size);
    case Weight::query_norm:
      return all(layer.query_norm, shape_.head_dim);
    case Weight::key_norm:
      return all(layer.key_norm, shape_.head_dim);
    case Weight::query_bias:
      return part(layer.qkv_bias, all_heads, heads, 0, Columns::heads);
    case Weight::key_bias:
      return part(layer.qkv_bias, all_heads, kv_heads, first_key, Columns::heads);
    case Weight::value_bias:
      return part(layer.qkv_bias, all_heads, kv_heads, first_value, Columns::heads);
    case Weight::output_bias:
      return all(layer.output_bias, shape_.hidden_size);
    case Weight::gate_bias:
      return part(layer.gate_up_bias, both, inner, 0, Columns::gate);
    case Weight::up_bias:
      return part(layer.gate_up_bias, both, inner, 0, Columns::up);
    case Weight::down_bias:
      return all(layer.down_bias, shape_.hidden_size);
    default:
      return;
  }
}

}  // namespace eventlm
