#include "weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <new>
#include <tuple>
#include <utility>

namespace eventlm {

namespace {

constexpr std::size_t kHugePage = 2 << 20;
// Rows of a matrix that a thread packs at a time.
constexpr std::size_t kRowsPackedAtOnce = kPanel;

}  // namespace

Weights::Weights(const Shape& shape, const std::vector<Instruction>& program, bool is_int8,
                 const std::vector<TypedWeight>& types)
    : layers(shape.num_layers), shape_(shape) {
  std::map<std::tuple<Weight, int, int>, PackedType> type_of;
  for (const TypedWeight& one : types) type_of[{one.weight, one.layer, one.expert}] = one.type;
  const std::size_t hidden = shape.hidden_size;
  std::vector<Matrix*> matrices;
  auto shaped = [&](Matrix& matrix, std::size_t num_out, std::size_t num_in, int layer, int expert,
                    std::initializer_list<std::pair<Weight, std::size_t>> weights) {
    matrix.num_out = num_out;
    matrix.num_in = num_in;
    matrix.is_int8 = is_int8;
    for (const auto& [weight, part_out] : weights) {
      if (part_out == 0) continue;
      const auto found = type_of.find({weight, layer, expert});
      if (found == type_of.end()) break;
      matrix.parts[matrix.num_parts++] = {nullptr, part_out, num_in, found->second};
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
  auto set_neurons = [&](const Instruction& now, int expert) {
    Neurons& part = layers[now.layer].neurons(expert);
    const std::size_t inner = now.num_neurons;
    part.is_gated = now.is_gated != 0;
    // Gate and up share panels, half and half. Zeros fill the last inputs of `down` that lie together, where a layer
    // with more neurons may have left something.
    if (part.is_gated) {
      shaped(part.gate_up, 2 * round_up(inner, kTileInputs), hidden, now.layer, expert,
             {{Weight::gate, inner}, {Weight::up, inner}});
      part.gate_up.has_gate = part.gate_up.num_parts > 0;
    } else {
      shaped(part.gate_up, inner, hidden, now.layer, expert, {{Weight::up, inner}});
    }
    shaped(part.down, hidden, inner, now.layer, expert, {{Weight::down, hidden}});
  };
  bool has_embedding = false;
  for (const Instruction& now : program) {
    Layer& layer = layers[now.layer];
    has_embedding |= now.kind == Kind::embed;
    const bool is_norm = now.kind == Kind::norm || now.kind == Kind::add_normed;
    if (is_norm || now.kind == Kind::keep || now.kind == Kind::add_kept) set(layer.norm(now.weight), hidden);
    if (now.kind == Kind::keep) layer.keeps_shared = true;
    if (now.kind == Kind::heads) {
      layer.num_heads = now.num_heads, layer.num_kv_heads = now.num_kv_heads, layer.head_dim = now.head_dim;
      layer.num_value_heads = now.num_value_heads;
      const std::size_t heads = layer.num_heads * layer.head_dim, key_columns = layer.first_value() - layer.first_key(),
                        value_columns = layer.first_gate() - layer.first_value(),
                        gate_columns = now.has_output_gate ? layer.first_key() : 0;
      shaped(layer.qkv, layer.first_gate() + gate_columns, hidden, now.layer, -1,
             {{Weight::query, layer.first_key()},
              {Weight::key, key_columns},
              {Weight::value, value_columns},
              {Weight::output_gate, gate_columns}});
      shaped(layer.output, hidden, heads, now.layer, -1, {{Weight::output, hidden}});
      const bool is_whole = now.qk_norm == QkNorm::whole;
      if (now.qk_norm != QkNorm::none) {
        set(layer.query_norm, is_whole ? heads : layer.head_dim);
        set(layer.key_norm, is_whole ? layer.num_kv_heads * layer.head_dim : layer.head_dim);
      }
    }
    if (now.kind == Kind::convolve) {
      const std::size_t channels = now.num_channels;
      shaped(layer.mixed, 3 * channels, hidden, now.layer, -1, {{Weight::mixed, 3 * channels}});
      shaped(layer.output, hidden, channels, now.layer, -1, {{Weight::output, hidden}});
      layer.num_channels = channels;
      layer.taps.assign(channels * now.num_taps, 0.0f);
    }
    if (now.kind == Kind::delta) {
      const std::size_t channels = now.num_channels, values = now.num_value_heads * now.value_dim;
      layer.gate_column = round_up(channels, kPanel);
      shaped(layer.mixed, layer.gate_column + values, hidden, now.layer, -1,
             {{Weight::mixed, channels}, {Weight::delta_gate, values}});
      shaped(layer.output, hidden, values, now.layer, -1, {{Weight::output, hidden}});
      layer.num_channels = channels;
      layer.taps.assign(channels * now.num_taps, 0.0f);
      layer.delta_rows.assign(2 * now.num_value_heads * hidden, 0.0f);
      layer.decay_rate.assign(now.num_value_heads, 0.0f);
      layer.decay_shift.assign(now.num_value_heads, 0.0f);
      layer.delta_scale.assign(now.value_dim, 1.0f);
    }
    if (now.kind == Kind::activate) set_neurons(now, -1);
    if (now.kind == Kind::inputs) {
      const std::size_t size = shape.inputs_size * shape.num_layers;
      shaped(inputs_projection, size, hidden, 0, -1, {{Weight::inputs_projection, size}});
      set(inputs_norm, shape.inputs_size);
      if (type_of.contains({Weight::inputs_embedding, 0, -1})) {
        const std::size_t vocab_size = shape.inputs_vocab_size;
        shaped(packed_inputs_embedding, vocab_size, size, 0, -1, {{Weight::inputs_embedding, vocab_size}});
      }
    }
    if (now.kind == Kind::activate_input) {
      const std::size_t size = now.num_neurons;
      shaped(layer.input_gate, size, hidden, now.layer, -1, {{Weight::input_gate, size}});
      shaped(layer.input_up, hidden, size, now.layer, -1, {{Weight::input_up, hidden}});
    }
    if (now.kind == Kind::route) layer.router.assign(now.num_experts * hidden, 0.0f);
    if (now.kind == Kind::experts) {
      layer.experts.resize(now.num_experts);
      for (int expert = 0; expert < now.num_experts; expert++) set_neurons(now, expert);
    }
  }
  set(final_norm, hidden);
  const bool is_embedding = shape.is_tied && has_embedding;
  const std::size_t head_size = shape.has_lm_head || is_embedding ? shape.vocab_size : 0;
  shaped(lm_head, head_size, hidden, 0, -1, {{Weight::lm_head, head_size}});
  if (!shape.is_tied && has_embedding && type_of.contains({Weight::embedding, 0, -1})) {
    shaped(packed_embedding, shape.vocab_size, hidden, 0, -1, {{Weight::embedding, shape.vocab_size}});
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

Weights::Place Weights::place_of(Weight weight, int layer_number, int expert) {
  Layer& layer = layers[layer_number];
  Neurons& part = layer.neurons(expert);
  auto place = [&layer](Matrix& matrix, int part = 0, std::size_t first = 0, Columns columns = Columns::plain) {
    const bool has_codes = matrix.num_parts > 0;
    // Gate and up do not share panels of codes.
    if (has_codes && columns != Columns::heads) columns = Columns::plain;
    return Place{&matrix, part, has_codes ? 0 : first, columns, layer.head_dim};
  };
  switch (weight) {
    case Weight::embedding:
      return place(packed_embedding.num_parts > 0 ? packed_embedding : lm_head);
    case Weight::lm_head:
      return place(lm_head);
    case Weight::query:
      return place(layer.qkv, 0, 0, Columns::heads);
    case Weight::key:
      return place(layer.qkv, 1, layer.first_key(), Columns::heads);
    case Weight::value:
      return place(layer.qkv, 2, layer.first_value(), Columns::heads);
    case Weight::output_gate:
      return place(layer.qkv, std::max(layer.qkv.num_parts, 1) - 1, layer.first_gate(), Columns::heads);
    case Weight::inputs_embedding:
      return place(packed_inputs_embedding);
    case Weight::inputs_projection:
      return place(inputs_projection);
    case Weight::input_gate:
      return place(layer.input_gate);
    case Weight::input_up:
      return place(layer.input_up);
    case Weight::mixed:
      return place(layer.mixed);
    case Weight::delta_gate:
      return place(layer.mixed, 1, layer.gate_column);
    case Weight::output:
      return place(layer.output);
    case Weight::gate:
      return place(part.gate_up, 0, 0, Columns::gate);
    case Weight::up:
      return place(part.gate_up, part.is_gated ? 1 : 0, 0, part.is_gated ? Columns::up : Columns::plain);
    case Weight::down:
      return place(part.down);
    default:
      return {};
  }
}

template <class Pack>
void Weights::share_rows(Team& team, const Place& place, std::size_t first_row, std::size_t num_rows,
                         std::size_t at_once, Pack&& pack) {
  Operation packing;
  team.run([&] {
    packing.share((num_rows + kRowsPackedAtOnce - 1) / kRowsPackedAtOnce, 1, [&](std::size_t piece) {
      const std::size_t begin = piece * kRowsPackedAtOnce, end = std::min(begin + kRowsPackedAtOnce, num_rows);
      for (std::size_t row = begin; row < end; row += at_once) {
        const std::size_t at = place.first + Matrix::column(place.columns, first_row + row, place.head_dim);
        pack(row, std::min(at_once, end - row), at, *place.matrix, place.matrix->parts[place.part]);
      }
    });
  });
}

void Weights::load_matrix(Team& team, Weight weight, int layer, int expert, const bf16* rows, std::size_t first_row,
                          std::size_t num_rows) {
  share_rows(team, place_of(weight, layer, expert), first_row, num_rows, kLanes,
             [&](std::size_t row, std::size_t count, std::size_t at, Matrix& matrix, PackedMatrix& part) {
               const bf16* from = rows + row * matrix.num_in;
               if (matrix.num_parts > 0) return part.round(from, count, at);
               for (std::size_t i = 0; i < count; i++) matrix.pack(from + i * matrix.num_in, at + i);
             });
}

void Weights::load_packed(Team& team, Weight weight, int layer, int expert, const std::uint8_t* rows,
                          std::size_t first_row, std::size_t num_rows) {
  share_rows(team, place_of(weight, layer, expert), first_row, num_rows, 1,
             [&](std::size_t row, std::size_t, std::size_t at, Matrix&, PackedMatrix& part) {
               part.pack(rows + row * part.row_bytes(), at);
             });
}

void Weights::load_exact(Weight weight, int layer_number, const float* rows, std::size_t first_row,
                         std::size_t num_rows) {
  Layer& layer = layers[layer_number];
  const std::size_t size = shape_.hidden_size;
  if (weight == Weight::router) {
    std::copy_n(rows, num_rows * size, &layer.router[first_row * size]);
  } else if (weight == Weight::taps) {
    const std::size_t num_channels = layer.num_channels, num_taps = layer.taps.size() / num_channels;
    for (std::size_t i = 0; i < num_rows * num_taps; i++) {
      layer.taps[i % num_taps * num_channels + first_row + i / num_taps] = rows[i];
    }
  } else {
    const std::size_t second = weight == Weight::delta_decay ? 1 : 0;
    for (std::size_t row = 0; row < num_rows; row++) {
      std::copy_n(rows + row * size, size, &layer.delta_rows[(2 * (first_row + row) + second) * size]);
    }
  }
}

void Weights::load_vector(Weight weight, bool is_bias, int layer_number, int expert, const float* source) {
  Layer& layer = layers[layer_number];
  Neurons& neurons = layer.neurons(expert);
  const std::size_t kv_size = layer.num_kv_heads * layer.head_dim;
  auto all = [&](Aligned<float>& to, std::size_t size) {
    to.assign(round_up(size, kPanel), 0.0f);
    std::copy_n(source, size, to.data());
  };
  auto exact = [&](Aligned<float>& to) { std::copy_n(source, to.size(), to.data()); };
  auto norm = [&](Norm& to) { (is_bias ? to.bias : to.weight).assign(source, source + to.weight.size()); };
  auto part = [&](Aligned<float>& to, const Matrix& whole, std::size_t size, std::size_t first, Columns columns) {
    to.resize(round_up(whole.num_out, kPanel));
    for (std::size_t i = 0; i < size; i++) to[first + Matrix::column(columns, i, layer.head_dim)] = source[i];
  };
  if (weight == Weight::final_norm) return norm(final_norm);
  if (weight == Weight::inputs_norm) return norm(inputs_norm);
  if (weight == Weight::lm_head) return all(head_bias, shape_.vocab_size);
  switch (weight) {
    case Weight::attention_norm:
    case Weight::attention_out_norm:
    case Weight::feed_forward_norm:
    case Weight::feed_forward_out_norm:
    case Weight::input_out_norm:
    case Weight::router_norm:
    case Weight::experts_norm:
    case Weight::shared_out_norm:
    case Weight::experts_out_norm:
      return norm(layer.norm(weight));
    case Weight::query_norm:
      return norm(layer.query_norm);
    case Weight::key_norm:
      return norm(layer.key_norm);
    case Weight::layer_scale:
      layer.scale = *source;
      return;
    case Weight::sinks:
      return all(layer.sinks, layer.num_heads);
    case Weight::query:
      return part(layer.qkv_bias, layer.qkv, layer.num_heads * layer.head_dim, 0, Columns::heads);
    case Weight::key:
      return part(layer.qkv_bias, layer.qkv, kv_size, layer.first_key(), Columns::heads);
    case Weight::value:
      return part(layer.qkv_bias, layer.qkv, kv_size, layer.first_value(), Columns::heads);
    case Weight::output:
      return all(layer.output_bias, shape_.hidden_size);
    case Weight::gate:
      return part(neurons.gate_up_bias, neurons.gate_up, neurons.down.num_in, 0, Columns::gate);
    case Weight::up:
      return part(neurons.gate_up_bias, neurons.gate_up, neurons.down.num_in, 0,
                  neurons.is_gated ? Columns::up : Columns::plain);
    case Weight::down:
      return all(neurons.down_bias, shape_.hidden_size);
    case Weight::mixed:
      return all(layer.mixed_bias, layer.mixed.num_out);
    case Weight::taps:
      return all(layer.taps_bias, layer.num_channels);
    case Weight::decay_rate:
      return exact(layer.decay_rate);
    case Weight::decay_shift:
      return exact(layer.decay_shift);
    case Weight::delta_scale:
      return exact(layer.delta_scale);
    case Weight::router:
      return all(layer.router_bias, layer.router.size() / shape_.hidden_size);
    case Weight::correction:
      return all(layer.correction, layer.router.size() / shape_.hidden_size);
    case Weight::expert_scale:
      return all(layer.expert_scale, layer.router.size() / shape_.hidden_size);
    case Weight::shared_scale:
      return all(layer.shared_scale, shape_.hidden_size);
    default:
      return;
  }
}

}  // namespace eventlm
