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

// A feed-forward part. `gate_up` is `up` alone where there is no gate.
struct Neurons {
  Matrix gate_up, down;
  Aligned<float> gate_up_bias, down_bias;
  bool is_gated = true;
};

struct Layer {
  // Each head of queries, then keys, then values, then gates begins a panel.
  Matrix qkv, output;
  std::size_t num_heads = 0, num_kv_heads = 0, num_value_heads = 0, head_dim = 0;
  // What all tokens pass, which a layer with experts may not have, and what some do.
  Neurons dense;
  std::vector<Neurons> experts;
  // A row for each expert; what is added to the router's products; what experts are ranked by beside their shares.
  Aligned<float> router, router_bias, correction;
  // What the shares of each expert are multiplied by; and whether what all tokens pass is normed by itself.
  Aligned<float> expert_scale;
  bool keeps_shared = false;
  // Of what the layer adds by a token's id; and what it multiplies the residual stream by at its end.
  Matrix input_gate, input_up;
  float scale = 1.0f;
  // Of what is convolved, and from `gate_column` on of the gates of the delta rule.
  Matrix mixed;
  std::size_t num_channels = 0, gate_column = 0;
  Aligned<float> mixed_bias, taps_bias;
  // [num_taps, channels]; of each value head a row for beta and one for the decay, and what makes a decay of that.
  Aligned<float> taps, delta_rows, decay_rate, decay_shift, delta_scale;
  // What the sigmoid is taken of that multiplies the part that all tokens pass.
  Aligned<float> shared_scale;
  // From attention_norm on, as Weight has them.
  Norm norms[9];
  Norm query_norm, key_norm;
  Aligned<float> qkv_bias, output_bias, sinks;

  // Columns of `qkv` that a head takes, and where keys, values and gates begin.
  std::size_t head_columns() const { return round_up(head_dim, kPanel); }
  std::size_t first_key() const { return num_heads * head_columns(); }
  std::size_t first_value() const { return first_key() + num_kv_heads * head_columns(); }
  std::size_t first_gate() const { return first_value() + num_value_heads * head_columns(); }

  Norm& norm(Weight weight) { return norms[static_cast<int>(weight) - static_cast<int>(Weight::attention_norm)]; }
  // Whether experts are added to what all tokens pass.
  bool has_shared() const { return dense.down.num_out > 0 && !keeps_shared; }
  bool adds_to_shared() const { return has_shared() && !experts.empty(); }
  // Of an expert, or of what all tokens pass if it is -1.
  Neurons& neurons(int expert) { return expert < 0 ? dense : experts[expert]; }
};

// A weight that is a matrix, or the part of one, of codes.
struct TypedWeight {
  Weight weight;
  std::int32_t layer, expert;  // 0 and -1 if it is of none
  PackedType type;
};

class Weights {
 public:
  // Throws std::bad_alloc. types: if there is one of a part of a matrix, there are those of all of its parts.
  Weights(const Shape& shape, const std::vector<Instruction>& program, bool is_int8,
          const std::vector<TypedWeight>& types);
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  // Rows of a matrix, bf16 [rows, in] as they lie in the checkpoint, from `first_row` on, a multiple of a panel.
  // Where codes are wanted, they are rounded. expert: -1 if it is of none.
  void load_matrix(Team& team, Weight weight, int layer, int expert, const bf16* rows, std::size_t first_row,
                   std::size_t num_rows);
  // The same of a matrix of codes, blocks as they lie in a GGUF file.
  void load_packed(Team& team, Weight weight, int layer, int expert, const std::uint8_t* rows, std::size_t first_row,
                   std::size_t num_rows);
  // Norms, sinks and biases. The weight of a norm is ones until it is loaded.
  void load_vector(Weight weight, bool is_bias, int layer, int expert, const float* source);
  // Rows of a matrix that stays float32.
  void load_exact(Weight weight, int layer, const float* rows, std::size_t first_row, std::size_t num_rows);

  std::vector<Layer> layers;
  Norm final_norm;
  Matrix lm_head;
  Aligned<float> head_bias;
  // [vocab_size, hidden_size]; null if it is tied to lm_head, or packed.
  const bf16* embedding = nullptr;
  Matrix packed_embedding;
  // The same of the inputs of layers, [inputs_vocab_size, num_layers * inputs_size], and what else they are made of.
  const bf16* inputs_embedding = nullptr;
  Matrix packed_inputs_embedding, inputs_projection;
  Norm inputs_norm;
  bool has_codes = false;

 private:
  // The matrix that a weight is a part of: the number of the part if it is of codes, and the columns in either, which
  // may depend on the size of heads.
  struct Place {
    Matrix* matrix;
    int part;
    std::size_t first;
    Columns columns;
    std::size_t head_dim;
  };

  Place place_of(Weight weight, int layer, int expert);
  // pack(row, at, matrix, part) for rows of a weight, `at_once` after one another, which lie so as columns too.
  template <class Pack>
  void share_rows(Team& team, const Place& place, std::size_t first_row, std::size_t num_rows, std::size_t at_once,
                  Pack&& pack);

  const Shape shape_;
  void* arena_ = nullptr;
  std::size_t arena_bytes_ = 0;
};

}  // namespace eventlm
