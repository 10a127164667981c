// What a decoder computes, as Python gives it: its shape, and the operations of a step in their order, which
// eventlm/models/program.py describes.
#pragma once

#include <cstdint>

namespace eventlm {

struct Shape {
  std::int32_t vocab_size, hidden_size, num_layers;
  std::int32_t is_tied;                         // the embedding is the output matrix
  std::int32_t has_lm_head;                     // else nobody asks for logits, and only an embedding may need its rows
  std::int32_t is_layer_norm;                   // norms subtract the mean, else they are of root mean squares
  std::int32_t inputs_size, inputs_vocab_size;  // of what each layer adds by a token's id; 0 if there is none
  float eps;
  float logits_multiplier, logits_soft_cap;
};

// Numbers are part of the interface with Python, here and below.
enum class Weight : std::int32_t {
  embedding,
  lm_head,
  final_norm,
  attention_norm,
  attention_out_norm,
  feed_forward_norm,
  feed_forward_out_norm,
  input_out_norm,
  router_norm,
  experts_norm,
  shared_out_norm,
  experts_out_norm,
  query,
  key,
  value,
  output,
  gate,
  up,
  down,
  query_norm,
  key_norm,
  sinks,
  inputs_embedding,
  inputs_projection,
  inputs_norm,
  input_gate,
  input_up,
  layer_scale,
  router,
  correction,
  expert_scale,
  shared_scale,
  output_gate,
  mixed,
  taps,
  delta_gate,
  delta_beta,
  delta_decay,
  decay_rate,
  decay_shift,
  delta_scale,
};

enum class Kind : std::int32_t {
  embed,
  norm,
  take,
  heads,
  attend,
  activate,
  multiply_add,
  multiply,
  add_normed,
  route,
  scale_inner,
  experts,
  add,
  convolve,
  delta,
  inputs,
  activate_input,
  scale,
  keep,
  add_kept,
};

// Of queries and keys: over each head, or over all heads together.
enum class QkNorm : std::int32_t { none, head, whole };

enum class Activation : std::int32_t { silu, gelu, gelu_tanh, relu2, swiglu_oai };

// Fields that an operation does not have are 0.
struct Instruction {
  Kind kind;
  std::int32_t layer;
  Weight weight;  // the norm or the matrix
  // Of `activate`, `activate_input` and `experts`, of the second without a gate.
  std::int32_t num_neurons;
  Activation activation;
  std::int32_t is_gated;
  // Of `heads` and `attend`. `heads` has no keys in a layer that attends to those of an earlier one.
  std::int32_t num_heads, num_kv_heads, head_dim;
  QkNorm qk_norm;
  std::int32_t rope;  // number of its tables; -1: none
  std::int32_t rotary_dim, is_interleaved;
  std::int32_t num_turned;           // of its pairs, the first ones
  std::int32_t window;               // tokens that a query sees; 0: all before it
  std::int32_t positions_per_scale;  // of query_scaling_beta
  // Of `route` and `experts`, the first two of both.
  std::int32_t num_experts, num_active;
  std::int32_t is_sigmoid;  // what shares are, else the softmax
  std::int32_t num_groups, num_active_groups;
  std::int32_t is_normalized;
  std::int32_t has_output_gate;  // of `heads` and `attend`
  // Of `convolve` and `delta`: where its part of a slot begins, in numbers; the rest of `delta`, where `is_interleaved`
  // means that value heads of different key heads are in turns.
  std::int32_t num_channels, num_taps, state;
  std::int32_t num_key_heads, num_value_heads, key_dim, value_dim;
  // Of `heads`, whose num_value_heads are 0 where values are the keys before their norm.
  std::int32_t has_value_norm;
  // Of `route` the multiplier of shares.
  float multiplier;
  float score_divisor, soft_cap, query_scaling_beta;
  float min_sum;  // what the sum of the shares counts as at least
};

}  // namespace eventlm
