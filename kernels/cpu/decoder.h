// The forward pass of a Llama or Qwen3 decoder over the tokens of one step: the same operations as
// eventlm/models/decoder.py and kernels/paged_attention.py, each shared out among a team of threads.
//
// Weights are bf16 or int8 and packed, the residual stream and everything between the products is float32.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "linear.h"
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
  o_proj,
  gate_up_proj,
  down_proj,
  lm_head,
  sample,
  count
};

constexpr std::size_t kRowsPerPiece = 4;

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <class T>
void grow(Aligned<T>& buffer, std::size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// One row of a step: num_tokens tokens after `start` others.
struct StepRow {
  std::int32_t start, num_tokens;
  const std::int32_t* blocks;
};

class Decoder {
 public:
  Decoder(const Shape& shape, const float* cosines, const float* sines, bool is_int8, int num_threads);

  // See Team.
  void pin(const int* processors) { team_.pin(processors); }

  // See Weights.
  // As it lies in the checkpoint, and must lie as long as this lives; null if it is the output matrix.
  void set_embedding(const bf16* embedding) { weights_.embedding = embedding; }
  void load_matrix(Weight weight, int layer, const bf16* rows, std::size_t first_row, std::size_t num_rows) {
    weights_.load_matrix(team_, weight, layer, rows, first_row, num_rows);
  }
  void load_vector(Weight weight, int layer, const float* source) { weights_.load_vector(weight, layer, source); }

  // The residual stream after the last layer, [tokens, hidden_size], of rows that lie one after the other.
  void forward(const std::int32_t* token_ids, const std::vector<StepRow>& rows, const KVStorage& kv, float* hidden);
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
  // A pass over part of the context by rows of the step that share a head.
  struct Item {
    std::int32_t row, first_query, num_queries, begin, end, partial;
  };
  struct Step;

  void reserve(std::size_t num_tokens);
  void plan_attention(const std::vector<StepRow>& rows);
  void divide_attention();
  void run_layers(Step& step);
  void run_layer(Step& step, int number);
  void norm_rows(Operation& operation, const Aligned<float>& weight, std::size_t count);
  void quantize_rows(Operation& operation, RowBuffer& rows, std::size_t count, Part part);
  void multiply_heads(Operation& operation, const Step& step, const Layer& layer, const KVCache& cache);
  void multiply_gate_up(Operation& operation, const Layer& layer, int num_rows);
  void multiply_add(Operation& operation, const Matrix& matrix, const Rows& rows, const Aligned<float>& bias,
                    Part part);
  void put_head(const Step& step, const Layer& layer, const KVCache& cache, std::size_t token, int head, float* sums);
  void attend_all(Operation& operation, const Step& step, const KVCache& cache);
  void attend_item(const Step& step, const KVCache& cache, const Item& item, const ContextRange& context,
                   const ContextRange& following, AttentionState& state);
  void combine_all(Operation& operation, const Step& step);
  void combine(const Step& step, std::size_t row, int head);
  template <class Put, class Then>
  void multiply_lm_head(const float* hidden, int num_rows, Put&& put, Then&& then);
  // Counts the time since the last call to a part. Operations call it as they end, one after the other.
  void lap(Part part);

  const Shape shape_;
  const Aligned<float> cosines_, sines_;
  Team team_;
  Weights weights_;

  // Of one step. Rows of the residual stream, padded to whole panels, and of queries have a line more, so that they do
  // not lie a power of two apart.
  const std::size_t hidden_stride_, query_stride_;
  Aligned<float> residual_, partials_;
  Aligned<std::uint32_t> queries_;
  RowBuffer normed_, attended_, inner_;
  std::vector<Item> items_;
  std::vector<std::int32_t> token_rows_, first_partials_;
  // The best token of each piece of a row's logits.
  Aligned<Best> winners_;
  // Of attention, an item and a head each: where each piece begins, and the end.
  std::vector<std::size_t> first_passes_;
  std::vector<Operation> operations_;
  std::int64_t times_[static_cast<int>(Part::count)] = {};
  std::int64_t last_ns_ = 0;
};

}  // namespace eventlm
