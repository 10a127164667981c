// The forward pass of a decoder over the tokens of one step: the operations of its program, the same as
// eventlm/models/decoder.py and kernels/paged_attention.py have, each shared out among a team of threads.
//
// Weights are bf16, int8 or codes, and packed, the residual stream and everything between the products is float32.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_passes.h"
#include "attention_plan.h"
#include "experts.h"
#include "linear.h"
#include "meeting.h"
#include "program.h"
#include "recurrent.h"
#include "sampling.h"
#include "team.h"
#include "weights.h"

namespace eventlm {

// What a step's time goes to.
enum class Part : std::int32_t {
  embed,
  norm,
  qkv_proj,
  attention,
  recurrent,
  layer_inputs,
  o_proj,
  gate_up_proj,
  down_proj,
  router,
  experts,
  lm_head,
  sample,
  meeting,
  add_parts,
  count
};

constexpr std::size_t kRowsPerPiece = 4;

template <class Buffer>
void grow(Buffer& buffer, std::size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// Whom a decoder meets that computes a part of a model: it has some heads, columns of neurons and rows of the
// vocabulary, the others have the rest, and all have the residual stream.
struct Peers {
  // Null: it has all. Its slots hold rows as hidden_stride_ has them, and one of the most rows of the vocabulary.
  Meeting* meeting = nullptr;
  // Each member's first row of the vocabulary, then how many rows there are; empty if each member has all.
  std::vector<std::int32_t> vocab_starts;
};

// Whom a decoder meets that has a part of each context, if those are long: the others have the rest, and all have the
// same weights.
struct Sharers {
  // Null: it has all. Its slots hold a partial of attention for each head of each token of a step's shared rows.
  Meeting* meeting = nullptr;
  std::int32_t shard_tokens = 0;

  ContextShards shards() const {
    return meeting == nullptr ? ContextShards{} : ContextShards{shard_tokens, meeting->size(), meeting->number()};
  }
};

class Decoder {
 public:
  // cosines, sines: of each rotary embedding, a row for each position, as Rotation has them. They are read where they
  // lie, as long as this lives. types: see Weights.
  Decoder(const Shape& shape, const std::vector<Instruction>& program, const float* const* cosines,
          const float* const* sines, bool is_int8, const std::vector<TypedWeight>& types, const Peers& peers,
          const Sharers& sharers, int num_threads);

  // See Team.
  void pin(const int* processors) { team_.pin(processors); }

  // See Weights.
  // As it lies in the checkpoint, and must lie as long as this lives; null if it is the output matrix, or of codes.
  void set_embedding(Weight weight, const bf16* embedding) {
    (weight == Weight::embedding ? weights_.embedding : weights_.inputs_embedding) = embedding;
  }
  void load_matrix(Weight weight, int layer, int expert, const bf16* rows, std::size_t first_row,
                   std::size_t num_rows) {
    weights_.load_matrix(team_, weight, layer, expert, rows, first_row, num_rows);
  }
  void load_packed(Weight weight, int layer, int expert, const std::uint8_t* rows, std::size_t first_row,
                   std::size_t num_rows) {
    weights_.load_packed(team_, weight, layer, expert, rows, first_row, num_rows);
  }
  void load_vector(Weight weight, bool is_bias, int layer, int expert, const float* source) {
    weights_.load_vector(weight, is_bias, layer, expert, source);
  }
  void load_exact(Weight weight, int layer, const float* rows, std::size_t first_row, std::size_t num_rows) {
    weights_.load_exact(weight, layer, rows, first_row, num_rows);
  }

  // The residual stream after the last layer, [tokens, hidden_size], of rows that lie one after the other. states: as
  // many rows, or none if no layer has a state. given: the stream to begin with, where the program embeds nothing.
  //
  // Peers call this, and what gives or draws from logits of it, with the same rows in the same order, and get the same.
  // It throws MeetingEnded if one of them does not.
  //
  // Sharers call `forward` together, each with the rows of whose contexts it has a part or will store the tokens.
  // num_shared: tokens of all shared rows, also of those that it has not.
  void forward(const std::int32_t* token_ids, const std::vector<StepRow>& rows, std::int32_t num_shared,
               const KVStorage& kv, const States& states, const float* given, float* hidden);
  // The last norm of what `forward` gave, [rows, hidden_size].
  void norm(const float* hidden, int num_rows, float* out) const;
  // Logits [rows, vocab_size] of what `forward` gave.
  void logits(const float* hidden, int num_rows, float* out);

  // One token id a row of logits [rows, vocab_size]: greedily at temperature 0, else by the noise of the row's two
  // keys. The lowest of equals, 0 where there is no number above minus infinity.
  void draw(const float* logits, const std::vector<Draw>& draws, std::int32_t* ids);

  // The same of what `forward` gave, without its logits ever being written.
  void draw_next(const float* hidden, const std::vector<Draw>& draws, std::int32_t* ids);

  // Nanoseconds since the start, by part.
  const std::int64_t* times() const { return times_; }

 private:
  struct Step;

  AttentionPlan& plan_of(const Instruction& attend);
  void reserve(std::size_t num_tokens);
  void run_program(const Step& step);
  void run(const Step& step, const Instruction& now, Operation* operation);
  void embed(Operation* operation, const Step& step, float multiplier);
  void look_up(std::int32_t id, float multiplier, float* to) const;
  void put_normed(std::size_t row, std::size_t input, f32x16 values);
  void norm_rows(Operation& operation, const Norm& norm, float multiplier, std::size_t count);
  void take_rows(Operation& operation, std::size_t count);
  void add_normed(Operation& operation, const Norm& norm, float multiplier, std::size_t count);
  void keep_normed(Operation& operation, const Norm& norm, bool is_added, std::size_t count);
  void scale_rows(Operation& operation, float scale, std::size_t count);
  void make_inputs(Operation* operation, const Step& step, float multiplier);
  void multiply_input(Operation& operation, const Instruction& now, int num_rows);
  void quantize_rows(Operation& operation, RowBuffer& rows, std::size_t num_inputs, std::size_t count, Part part);
  void multiply_out(Operation* operation, const Instruction& now, int num_rows);
  void multiply_neurons(Operation& operation, const Instruction& now, int num_rows);
  void route(Operation* operation, const Instruction& now, std::size_t count);
  Units units_of(const Neurons& expert, int num_rows) const;
  void scale_inner(Operation& operation, const Instruction& now, std::size_t count);
  void pass_experts(Operation* operation, const Instruction& now, std::size_t count);
  void add_expert(const Neurons& expert, const ExpertRows& own, std::size_t begin, std::size_t end, float* sums);
  void add_update(Operation& operation, float multiplier, std::size_t count);
  void multiply_heads(Operation& operation, const Step& step, const Instruction& heads);
  void norm_raw_heads(Operation& operation, const Step& step, const Instruction& heads);
  void put_head(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token, int head,
                float* sums);
  void store_value(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token, int head,
                   const float* sums) const;
  void turn_and_store(const Step& step, const Instruction& heads, const KVCache& cache, std::size_t token, int head,
                      float* sums, const Norm* norm);
  void multiply_mixed(Operation& operation, const Instruction& now, int num_rows);
  void convolve_rows(Operation& operation, const Step& step, const Instruction& now);
  void run_delta(Operation& operation, const Step& step, const Instruction& now);
  void run_heads(const Instruction& now, std::size_t unit, std::size_t first, int count, float* state);
  void put_attended(std::size_t token, std::size_t input, f32x16 values, bool is_gated);
  StepQueries queries_of(const Step& step, const Instruction& now);
  void attend_all(Operation* operation, const Step& step, const Instruction& now);
  bool has_peers() const { return peers_.meeting != nullptr; }
  bool is_vocab_split() const { return !peers_.vocab_starts.empty(); }
  std::int32_t first_id() const { return is_vocab_split() ? peers_.vocab_starts[peers_.meeting->number()] : 0; }
  std::int32_t num_ids() const { return is_vocab_split() ? peers_.vocab_starts.back() : shape_.vocab_size; }
  bool has_ended() const { return has_ended(peers_.meeting) || has_ended(sharers_.meeting); }
  static bool has_ended(const Meeting* meeting) { return meeting != nullptr && meeting->state() != Met::all; }
  void throw_if_ended() const;
  // Rows of the meeting to come.
  float* slot() const { return reinterpret_cast<float*>(peers_.meeting->mine()); }
  void meet(Meeting& meeting, std::size_t num_bytes);
  void meet(std::size_t num_bytes) { meet(*peers_.meeting, num_bytes); }
  void meet_rows(std::size_t count) { meet(count * hidden_stride_ * sizeof(float)); }
  void meet_sharers(const Instruction& now, std::int32_t num_shared);
  template <class Put>
  void add_parts(Operation& operation, std::size_t count, Put&& put);
  void gather_logits(float* logits, std::size_t num_rows);
  void change_logits(std::size_t panel, f32x16& left, f32x16& right) const;
  template <class Put, class Then>
  void multiply_lm_head(const float* hidden, int num_rows, Put&& put, Then&& then);
  // Counts the time since the last call to a part. Operations call it as they end, one after the other.
  void lap(Part part);

  const Shape shape_;
  const std::vector<Instruction> program_;
  const Peers peers_;
  const Sharers sharers_;
  const ContextShards shards_;
  const std::vector<const float*> cosines_, sines_;
  Team team_;
  Weights weights_;

  // Of one step. Rows of the residual stream, padded to whole panels, and of heads have a line more, so that they do
  // not lie a power of two apart. Few programs have updates, shared parts that are normed by themselves, queries and
  // keys that wait for a norm, gates behind attention, inputs of convolutions or of layers.
  const std::size_t hidden_stride_, query_stride_, raw_stride_, gate_stride_, mixed_stride_, inputs_stride_;
  const bool has_updates_, has_kept_, has_raw_heads_, has_exact_;
  Aligned<float> residual_, update_, kept_, raw_heads_, gates_, mixed_, inputs_, partials_;
  Aligned<std::uint32_t> queries_;
  RowBuffer normed_, attended_, inner_;
  Routing routing_;
  // What is normed, not rounded, for matrices that are float32.
  Aligned<float> exact_;
  // With experts: their inputs, and what their neurons give, by slot; what multiplies the shared part of each row.
  RowBuffer gathered_, passed_;
  std::vector<float> shared_scales_;
  std::vector<AttentionPlan> plans_;  // of each window and shape of heads
  std::vector<std::int32_t> token_rows_;
  // The best token of each piece of a row's logits.
  Aligned<Best> winners_;
  // Of each instruction the number of its first operation; and of all together.
  std::vector<std::size_t> first_operations_;
  std::vector<Operation> operations_;
  std::int64_t times_[static_cast<int>(Part::count)] = {};
  std::int64_t last_ns_ = 0;
};

// Calls put(row, i, 16 numbers from i on) with the sums of what all members have in their slots, in one order.
template <class Put>
void Decoder::add_parts(Operation& operation, std::size_t count, Put&& put) {
  const Meeting& meeting = *peers_.meeting;
  auto add_row = [&](std::size_t row) {
    for (int i = 0; i < shape_.hidden_size; i += kLanes) {
      const std::size_t at = row * hidden_stride_ + i;
      auto part = [&](int member) { return load<f32x16>(reinterpret_cast<const float*>(meeting.part(member)) + at); };
      f32x16 sum = part(0);
      for (int member = 1; member < meeting.size(); member++) sum += part(member);
      put(row, i, sum);
    }
  };
  operation.share(count, kRowsPerPiece, add_row, [this] { lap(Part::add_parts); });
}

struct Decoder::Step {
  const std::int32_t* token_ids;
  const std::vector<StepRow>& rows;
  std::int32_t num_shared;
  const KVStorage& kv;
  const States& states;
  std::size_t num_tokens;
  std::vector<std::int32_t> first_token;  // of each row
};

}  // namespace eventlm
