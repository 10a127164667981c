// A decoder's weights: matrices packed in one piece of memory, the rest as float32.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "team.h"

namespace eventlm {

struct Shape {
  std::int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, max_positions;
  std::int32_t is_tied;
  float eps;
};

// The weights that a checkpoint names; numbers are part of the interface with Python.
enum class Weight : std::int32_t {
  embedding,
  lm_head,
  final_norm,
  input_norm,
  post_attention_norm,
  query,
  key,
  value,
  output,
  gate,
  up,
  down,
  query_norm,
  key_norm,
  query_bias,
  key_bias,
  value_bias,
  output_bias,
  gate_bias,
  up_bias,
  down_bias,
};

struct Layer {
  // Each head of queries, then keys, then values begins a panel.
  Matrix qkv, output, gate_up, down;
  Aligned<float> input_norm, post_attention_norm, query_norm, key_norm;
  Aligned<float> qkv_bias, output_bias, gate_up_bias, down_bias;
};

class Weights {
 public:
  // Throws std::bad_alloc.
  Weights(const Shape& shape, bool is_int8);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Rows of a matrix, bf16 [rows, in] as they lie in the checkpoint, from `first_row` on, a multiple of a panel.
  void load_matrix(Team& team, Weight weight, int layer, const bf16* rows, std::size_t first_row, std::size_t num_rows);
  // Norms and biases.
  void load_vector(Weight weight, int layer, const float* source);

  std::vector<Layer> layers;
  Aligned<float> final_norm;
  Matrix lm_head;
  // [vocab_size, hidden_size]; null if it is tied to lm_head.
  const bf16* embedding = nullptr;

 private:
  const Shape shape_;
  void* arena_ = nullptr;
  std::size_t arena_bytes_ = 0;
};

}  // namespace eventlm
