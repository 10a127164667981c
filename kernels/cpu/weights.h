// A decoder's weights: matrices packed in one piece of memory, the rest as float32.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "program.h"
#include "team.h"

namespace eventlm {

// One that subtracts the mean has a bias, of zeros if need be; one of root mean squares has none.
struct Norm {
  Aligned<float> weight, bias;
  float eps;
};

struct Layer {
  // Each head of queries, then keys, then values begins a panel. `gate_up` is `up` alone where there is no gate.
  Matrix qkv, output, gate_up, down;
  bool is_gated = true;
  // From attention_norm on, as Weight has them.
  Norm norms[4];
  Norm query_norm, key_norm;
  Aligned<float> qkv_bias, output_bias, gate_up_bias, down_bias, sinks;

  Norm& norm(Weight weight) { return norms[static_cast<int>(weight) - static_cast<int>(Weight::attention_norm)]; }
};

class Weights {
 public:
  // Throws std::bad_alloc. types: what the codes of each Weight of each layer are, [num_layers][kNumWeights], where
  // those of the whole decoder are the first layer's. A matrix that has one type has those of all that it is made of.
  Weights(const Shape& shape, const std::vector<Instruction>& program, bool is_int8, const PackedType* types);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Rows of a matrix, bf16 [rows, in] as they lie in the checkpoint, from `first_row` on, a multiple of a panel.
  // Where codes are wanted, they are rounded.
  void load_matrix(Team& team, Weight weight, int layer, const bf16* rows, std::size_t first_row, std::size_t num_rows);
  // The same of a matrix of codes, blocks as they lie in a GGUF file.
  void load_packed(Team& team, Weight weight, int layer, const std::uint8_t* rows, std::size_t first_row,
                   std::size_t num_rows);
  // Norms, sinks and biases. The weight of a norm is ones until it is loaded.
  void load_vector(Weight weight, bool is_bias, int layer, const float* source);

  std::vector<Layer> layers;
  Norm final_norm;
  Matrix lm_head;
  Aligned<float> head_bias;
  // [vocab_size, hidden_size]; null if it is tied to lm_head, or packed.
  const bf16* embedding = nullptr;
  Matrix packed_embedding;
  bool has_codes = false;

 private:
  // The matrix that a weight is a part of: the number of the part if it is of codes, and the columns in either.
  struct Place {
    Matrix* matrix;
    int part;
    std::size_t first;
    Columns columns;
  };

  Place place_of(Weight weight, int layer);
  // pack(row, at, matrix, part) for rows of a weight, `at_once` after one another, which lie so as columns too.
  template <class Pack>
  void share_rows(Team& team, Weight weight, int layer, std::size_t first_row, std::size_t num_rows,
                  std::size_t at_once, Pack&& pack);

  const Shape shape_;
  void* arena_ = nullptr;
  std::size_t arena_bytes_ = 0;
};

}  // namespace eventlm
