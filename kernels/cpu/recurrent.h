// The states that layers keep of sequences in place of keys and values, and the steps that change them.
//
// Units of a layer's channels or heads do not see each other, so threads share them out; within a unit a step's rows
// come in their order, and the tokens of a row one after the other. So a row's bits depend neither on threads nor on
// how its prompt was cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_plan.h"
#include "vec.h"

namespace eventlm {

// Tokens that a convolution sees at most, and channels of it that are a unit.
constexpr int kMaxTaps = 8;
constexpr int kChannels = 32;

// The state is copied to `slot` when so many of the row's tokens are in it.
struct StateCopy {
  std::int32_t count, slot;
};

// Of a row: the slot of its sequence; the one that the state is copied from first, -1 if it begins as zeros.
struct StateRow {
  std::int32_t slot, source, num_copies;
  const StateCopy* copies;
};

struct States {
  float* memory;  // [slots, slot_size]
  std::size_t slot_size;
  std::vector<StateRow> rows;

  float* part(std::int32_t slot, std::size_t first) const { return memory + slot * slot_size + first; }

  // Calls compute(number of the first token, how many, state) for all rows, each in pieces of up to `most` tokens that
  // end where the state is copied. first, size: of the numbers of a slot that are wanted.
  template <class Compute>
  void walk(const std::vector<StepRow>& steps, std::size_t first, std::size_t size, int most, Compute&& compute) const {
    std::size_t token = 0;
    for (std::size_t number = 0; number < rows.size(); number++) {
      const StateRow& row = rows[number];
      float* state = part(row.slot, first);
      if (row.source < 0) {
        std::fill_n(state, size, 0.0f);
      } else if (row.source != row.slot) {
        std::copy_n(part(row.source, first), size, state);
      }
      int done = 0;
      auto compute_until = [&](int end) {
        for (; done < end; done += std::min(most, end - done)) compute(token + done, std::min(most, end - done), state);
      };
      for (int i = 0; i < row.num_copies; i++) {
        compute_until(row.copies[i].count);
        std::copy_n(state, size, part(row.copies[i].slot, first));
      }
      compute_until(steps[number].num_tokens);
      token += steps[number].num_tokens;
    }
  }
};

}  // namespace eventlm
