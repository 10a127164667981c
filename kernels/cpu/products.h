// Products with single matrices, for models whose other operations torch computes: in bf16, with float32 sums.
#pragma once

#include <cstdint>

#include "linear.h"
#include "matrix.h"
#include "rows.h"
#include "team.h"

namespace eventlm {

class Products {
 public:
  // Throws std::bad_alloc, and std::system_error if the system does not give as many threads.
  Products(std::size_t most_inputs, int num_threads) : team_(num_threads), rows_(most_inputs, Inputs::bf16) {}

  void pin(const int* processors) { team_.pin(processors); }

  // Packs rows of a matrix, [num_rows, num_in] from `first_row` on, into what is zeros before the first of them.
  void pack(Matrix matrix, const bf16* rows, std::size_t first_row, std::size_t num_rows);

  // out = inputs [num_rows, num_in] times the matrix, [num_rows, num_out], with a bias added if it is not null.
  void multiply(const Matrix& matrix, const bf16* inputs, int num_rows, const float* bias, bf16* out);

 private:
  Team team_;
  RowBuffer rows_;
};

}  // namespace eventlm
