#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <initializer_list>
#include <new>
#include <utility>

namespace eventlm {

namespace {

constexpr std::size_t kHugePage = 2 << 20;
// Rows of a matrix that a thread packs at a time.
constexpr std::size_t kRowsPackedAtOnce = kPanel;

}  // namespace

Weights::Weights(const Shape& shape, const std::vector<Instruction>& program, bool is_int8, const PackedType* types)
    : layers(shape.num_layers), shape_(shape) {
  const std::size_t hidden = shape.hidden_size;
  const std::size_t heads = static_cast<std::size_t>(shape.num_heads) * shape.head_dim;
  const std::size_t all_heads = static_cast<std::size_t>(shape.num_heads) + 2 * shape.num_kv_heads;
  std::vector<Matrix*> matrices;
  auto shaped = [&](Matrix& matrix, std::size_t num_out, std::size_t num_in, int layer,
                    std::initializer_list<std::pair<Weight, std::size_t>> weights) {
    matrix.num_out = num_out;
    matrix.num_in = num_in;
    matrix.is_int8 = is_int8;
    for (const auto& [weight, part_out] : weights) {
      const PackedType type = types[layer * kNumWeights + static_cast<int>(weight)];
      if (type == PackedType::none) break;
      matrix.parts[matrix.num_parts++] = {nullptr, part_out, num_in, type};
      has_codes = true;
    }
    arena_bytes_ += round_up(matrix.num_bytes(), 64);
    matrices.push_back(&matrix);
  };
  auto set = [&](Norm& norm, std::size_t size) {
    norm.weight.assign(size, 1.0f);
    if (shape.is_layer_norm) norm.bias.assign(size, 0.0f);
    norm.eps = shape.eps;
  };
  for (const Instruction& now : program) {
    Layer& layer = layers[now.layer];
    if (now.kind == Kind::norm || now.kind == Kind::add_normed) set(layer.norm(now.weight), hidden);
    if (now.kind == Kind::heads) {
      const std::size_t head = round_up(shape.head_dim, kPanel), kv_size = shape.num_kv_heads * head;
      shaped(layer.qkv, all_heads * head, hidden, now.layer,
             {{Weight::query, shape.num_heads * head}, {Weight::key, kv_size}, {Weight::value, kv_size}});
      shaped(layer.output, hidden, heads, now.layer, {{Weight::output, hidden}});
      const bool is_whole = now.qk_norm == QkNorm::whole;
      if (now.qk_norm != QkNorm::none) {
        set(layer.query_norm, is_whole ? heads : shape.head_dim);
        set(layer.key_norm, is_whole ? heads / shape.num_heads * shape.num_kv_heads : shape.head_dim);
      }
    }
    if (now.kind == Kind::activate) {
      const std::size_t inner = now.num_neurons;
      layer.is_gated = now.is_gated != 0;
      // Gate and up share panels, half and half. Zeros fill the last inputs of `down` that lie together, where a layer
      // with more neurons may have left something.
      if (layer.is_gated) {
        shaped(layer.gate_up, 2 * round_up(inner, kTileInputs), hidden, now.layer,
               {{Weight::gate, inner}, {Weight::up, inner}});
        layer.gate_up.has_gate = layer.gate_up.num_parts > 0;
      } else {
        shaped(layer.gate_up, inner, hidden, now.layer, {{Weight::up, inner}});
      }
      shaped(layer.down, hidden, inner, now.layer, {{Weight::down, hidden}});
    }
  }
  set(final_norm, hidden);
  shaped(lm_head, shape.vocab_size, hidden, 0, {{Weight::lm_head, shape.vocab_size}});
  if (!shape.is_tied && types[static_cast<int>(Weight::embedding)] != PackedType::none) {
    shaped(packed_embedding, shape.vocab_size, hidden, 0, {{Weight::embedding, shape.vocab_size}});
  }
  arena_bytes_ = round_up(arena_bytes_, kHugePage) + kHugePage;
  arena_ = mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (arena_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(arena_, arena_bytes_, MADV_HUGEPAGE);
#endif
  auto at = reinterpret_cast<char*>(round_up(reinterpret_cast<std::size_t>(arena_), kHugePage));
  for (Matrix* matrix : matrices) {
    matrix->set_memory(at);
    at += round_up(matrix->num_bytes(), 64);
  }
}

Weights::~Weights() { munmap(arena_, arena_bytes_); }

Weights::Place Weights::place_of(Weight weight, int layer_number) {
  const std::size_t head_columns = round_up(shape_.head_dim, kPanel);
  const std::size_t first_key = shape_.num_heads * head_columns;
  const std::size_t first_value = first_key + shape_.num_kv_heads * head_columns;
  Layer& layer = layers[layer_number];
  auto place = [](Matrix& matrix, int part = 0, std::size_t first = 0, Columns columns = Columns::plain) {
    const bool has_codes = matrix.num_parts > 0;
    // Gate and up do not share panels of codes.
    if (has_codes && columns != Columns::heads) columns = Columns::plain;
    return Place{&matrix, part, has_codes ? 0 : first, columns};
  };
  switch (weight) {
    case Weight::embedding:
      return place(packed_embedding.num_parts > 0 ? packed_embedding : lm_head);
    case Weight::lm_head:
      return place(lm_head);
    case Weight::query:
      return place(layer.qkv, 0, 0, Columns::heads);
    case Weight::key:
      return place(layer.qkv, 1, first_key, Columns::heads);
    case Weight::value:
      return place(layer.qkv, 2, first_value, Columns::heads);
    case Weight::output:
      return place(layer.output);
    case Weight::gate:
      return place(layer.gate_up, 0, 0, Columns::gate);
    case Weight::up:
      return place(layer.gate_up, layer.is_gated ? 1 : 0, 0, layer.is_gated ? Columns::up : Columns::plain);
    case Weight::down:
      return place(layer.down);
    default:
      return {};
  }
}

template <class Pack>
void Weights::share_rows(Team& team, Weight weight, int layer, std::size_t first_row, std::size_t num_rows,
                         std::size_t at_once, Pack&& pack) {
  const Place place = place_of(weight, layer);
  Operation packing;
  team.run([&] {
    packing.share((num_rows + kRowsPackedAtOnce - 1) / kRowsPackedAtOnce, 1, [&](std::size_t piece) {
      const std::size_t begin = piece * kRowsPackedAtOnce, end = std::min(begin + kRowsPackedAtOnce, num_rows);
      for (std::size_t row = begin; row < end; row += at_once) {
        const std::size_t at = place.first + Matrix::column(place.columns, first_row + row, shape_.head_dim);
        pack(row, std::min(at_once, end - row), at, *place.matrix, place.matrix->parts[place.part]);
      }
    });
  });
}

void Weights::load_matrix(Team& team, Weight weight, int layer, const bf16* rows, std::size_t first_row,
                          std::size_t num_rows) {
  share_rows(team, weight, layer, first_row, num_rows, kLanes,
             [&](std::size_t row, std::size_t count, std::size_t at, Matrix& matrix, PackedMatrix& part) {
               const bf16* from = rows + row * matrix.num_in;
               if (matrix.num_parts > 0) return part.round(from, count, at);
               for (std::size_t i = 0; i < count; i++) matrix.pack(from + i * matrix.num_in, at + i);
             });
}

void Weights::load_packed(Team& team, Weight weight, int layer, const std::uint8_t* rows, std::size_t first_row,
                          std::size_t num_rows) {
  share_rows(team, weight, layer, first_row, num_rows, 1,
             [&](std::size_t row, std::size_t, std::size_t at, Matrix&, PackedMatrix& part) {
               part.pack(rows + row * part.row_bytes(), at);
             });
}

void Weights::load_vector(Weight weight, bool is_bias, int layer_number, const float* source) {
  const std::size_t heads = static_cast<std::size_t>(shape_.num_heads) * shape_.head_dim;
  const std::size_t kv_heads = static_cast<std::size_t>(shape_.num_kv_heads) * shape_.head_dim;
  const std::size_t head_columns = round_up(shape_.head_dim, kPanel);
  const std::size_t first_key = shape_.num_heads * head_columns;
  const std::size_t first_value = first_key + shape_.num_kv_heads * head_columns;
  auto all = [&](Aligned<float>& to, std::size_t size) {
    to.assign(round_up(size, kPanel), 0.0f);
    std::copy_n(source, size, to.data());
  };
  auto norm = [&](Norm& to) { (is_bias ? to.bias : to.weight).assign(source, source + to.weight.size()); };
  auto part = [&](Aligned<float>& to, const Matrix& whole, std::size_t size, std::size_t first, Columns columns) {
    to.resize(round_up(whole.num_out, kPanel));
    for (std::size_t i = 0; i < size; i++) to[first + Matrix::column(columns, i, shape_.head_dim)] = source[i];
  };
  if (weight == Weight::final_norm) return norm(final_norm);
  if (weight == Weight::lm_head) return all(head_bias, shape_.vocab_size);
  Layer& layer = layers[layer_number];
  switch (weight) {
    case Weight::attention_norm:
    case Weight::attention_out_norm:
    case Weight::feed_forward_norm:
    case Weight::feed_forward_out_norm:
      return norm(layer.norm(weight));
    case Weight::query_norm:
      return norm(layer.query_norm);
    case Weight::key_norm:
      return norm(layer.key_norm);
    case Weight::sinks:
      return all(layer.sinks, shape_.num_heads);
    case Weight::query:
      return part(layer.qkv_bias, layer.qkv, heads, 0, Columns::heads);
    case Weight::key:
      return part(layer.qkv_bias, layer.qkv, kv_heads, first_key, Columns::heads);
    case Weight::value:
      return part(layer.qkv_bias, layer.qkv, kv_heads, first_value, Columns::heads);
    case Weight::output:
      return all(layer.output_bias, shape_.hidden_size);
    case Weight::gate:
      return part(layer.gate_up_bias, layer.gate_up, layer.down.num_in, 0, Columns::gate);
    case Weight::up:
      return part(layer.gate_up_bias, layer.gate_up, layer.down.num_in, 0,
                  layer.is_gated ? Columns::up : Columns::plain);
    case Weight::down:
      return all(layer.down_bias, shape_.hidden_size);
    default:
      return;
  }
}

}  // namespace eventlm
