// Which experts the tokens of a step pass in a layer, and which rows each of those experts gets.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "packed.h"
#include "program.h"
#include "rows.h"
#include "vec.h"

namespace eventlm {

// Rows of an expert begin at a multiple of it: those that a product takes together lie in one tile.
constexpr int kSlotMultiple = kTileRows;

// An expert that has tokens. Its rows are the slots from `first` on, its first product is the unit `first_unit`.
struct ExpertRows {
  int expert, first, count;
  std::size_t first_unit;
};

// The choice of one layer. A pair is a token and one of its experts; those of a token follow one another.
class Routing {
 public:
  // Of the layers that have most.
  Routing(const std::vector<Instruction>& program) {
    for (const Instruction& now : program) {
      if (now.kind != Kind::route) continue;
      most_active_ = std::max(most_active_, static_cast<std::size_t>(now.num_active));
      most_experts_ = std::max(most_experts_, static_cast<std::size_t>(now.num_experts));
    }
    stride_ = round_up(most_experts_, kLanes);
    counts_.resize(most_experts_);
    rows_.reserve(most_experts_);
  }

  bool is_used() const { return most_experts_ > 0; }
  std::size_t num_slots(std::size_t num_tokens) const {
    const std::size_t num_pairs = num_tokens * most_active_;
    return num_pairs + std::min(num_pairs, most_experts_) * (kSlotMultiple - 1);
  }
  void reserve(std::size_t num_tokens);

  // The router's products with a token.
  float* products(std::size_t token) { return &products_[token * kPartsOfToken * stride_]; }
  // Chooses by them. correction, scale: null if there is none.
  void choose(const Instruction& route, std::size_t token, const float* correction, const float* scale);
  // Gives each expert its slots, after all have chosen. units(rows): of a product of these; rows() has as many
  // as there are products by then.
  template <class UnitsOf>
  void group(const Instruction& route, std::size_t num_tokens, UnitsOf&& units);

  // Of a pair.
  std::size_t slot(std::size_t pair) const { return slots_[pair]; }
  // Of a slot.
  std::size_t token(std::size_t slot) const { return tokens_[slot]; }
  float share(std::size_t slot) const { return slot_shares_[slot]; }
  // In the order of their experts.
  const std::vector<ExpertRows>& rows() const { return rows_; }
  std::size_t num_units() const { return num_units_.load(std::memory_order_acquire); }
  // Those that a unit is of.
  const ExpertRows& rows_of_unit(std::size_t unit) const {
    return *--std::upper_bound(rows_.begin(), rows_.end(), unit,
                               [](std::size_t number, const ExpertRows& rows) { return number < rows.first_unit; });
  }

 private:
  // The products, which become shares; what experts are ranked by; the sums of groups.
  static constexpr std::size_t kPartsOfToken = 3;

  std::size_t most_active_ = 0, most_experts_ = 0, stride_ = 0;
  Aligned<float> products_;
  std::vector<std::int32_t> experts_, slots_, tokens_, counts_;
  std::vector<float> shares_, slot_shares_;
  std::vector<ExpertRows> rows_;
  // A member that comes late may read it while it is set for another layer, and has no use for it.
  std::atomic<std::size_t> num_units_{0};
};

template <class UnitsOf>
void Routing::group(const Instruction& route, std::size_t num_tokens, UnitsOf&& units) {
  const std::size_t num_active = route.num_active, num_pairs = num_tokens * num_active;
  std::fill_n(counts_.begin(), route.num_experts, 0);
  for (std::size_t pair = 0; pair < num_pairs; pair++) counts_[experts_[pair]]++;
  rows_.clear();
  int slot = 0;
  for (int expert = 0; expert < route.num_experts; expert++) {
    const int count = counts_[expert];
    counts_[expert] = slot;
    if (count == 0) continue;
    rows_.push_back({expert, slot, count, 0});
    slot += static_cast<int>(round_up(count, kSlotMultiple));
  }
  std::size_t unit = 0;
  for (ExpertRows& rows : rows_) {
    rows.first_unit = unit;
    unit += units(rows);
  }
  num_units_.store(unit, std::memory_order_release);
  // What was an expert's count is its next slot.
  for (std::size_t pair = 0; pair < num_pairs; pair++) {
    const int at = counts_[experts_[pair]]++;
    slots_[pair] = at;
    tokens_[at] = static_cast<std::int32_t>(pair / num_active);
    slot_shares_[at] = shares_[pair];
  }
}

}  // namespace eventlm
