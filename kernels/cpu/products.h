// Products with single matrices, norms and rotations, for models whose other operations torch computes: of bf16, in
// float32.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "matrix.h"
#include "rows.h"
#include "team.h"

namespace eventlm {

// A packed matrix, what is added to its products, as many as fill the last panel, or null, and where they go:
// [rows, num_out].
struct Product {
  char* memory;
  std::int64_t num_out;
  const float* bias;
  bf16* out;
};

// Heads of tokens. Elements of a head lie one after the other.
struct Heads {
  const bf16* elements;
  std::int64_t head_stride, token_stride;

  const bf16* at(std::size_t token, int head) const { return elements + token * token_stride + head * head_stride; }
};

// A quarter of a millisecond or so: torch's operations between two products take less.
constexpr int kMostYields = 1000;

class Products {
 public:
  // Throws std::bad_alloc, and std::system_error if the system does not give as many threads.
  Products(std::size_t most_inputs, int num_threads)
      : team_(num_threads, kMostYields), rows_(most_inputs, Inputs::bf16) {}

  void pin(const int* processors) { team_.pin(processors); }
  Team& team() { return team_; }

  // Packs rows of a matrix, [num_rows, num_in] from `first_row` on, into what is zeros before the first of them.
  void pack(Matrix matrix, const bf16* rows, std::size_t first_row, std::size_t num_rows);

  // The same inputs, [num_rows, num_in], times each of some matrices.
  void multiply(const std::vector<Product>& products, std::size_t num_in, const bf16* inputs, int num_rows);

  // Of each head x * cosines + y * sines, where y are the two halves of x in the other order, the first with the other
  // sign. cosines, sines: [num_tokens, head_dim]. out: [num_tokens, num_heads, head_dim].
  void rotate(const Heads& heads, std::size_t num_tokens, int num_heads, int head_dim, const bf16* cosines,
              const bf16* sines, bf16* out);

  // The RMS norms of x, [num_rows, size], times the weight. size is a multiple of 16.
  void norm(const bf16* x, std::size_t num_rows, std::size_t size, const float* weight, float eps, bf16* out);

 private:
  // Calls work(i) for each of `count`, which takes `size` numbers.
  template <class Work>
  void share_small(std::size_t count, std::size_t size, Work&& work);

  Team team_;
  RowBuffer rows_;
  // Of the products of one call.
  std::vector<Operation> operations_;
};

}  // namespace eventlm
