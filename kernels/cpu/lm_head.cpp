// What follows the layers: the last norm, the output matrix, and the draw of a token.
#include "decoder.h"
#include "pointwise.h"

namespace eventlm {

namespace {

constexpr std::int32_t kIdsPerPiece = 8192;
// So many are drawn from sooner than threads wake that have gone to sleep since the last product.
constexpr std::size_t kMaxPiecesAlone = 24;

// The first of the best.
Best best_of(const Best* of, std::size_t count) {
  return *std::max_element(of, of + count, [](const Best& a, const Best& b) { return a.score < b.score; });
}

// -1 if a score is plus infinity, that is if the row's logits are not finite.
std::int32_t winner(const Best& best) { return best.score == INFINITY ? -1 : best.id; }

}  // namespace

void Decoder::norm(const float* hidden, int num_rows, float* out) const {
  for (int row = 0; row < num_rows; row++, hidden += shape_.hidden_size, out += shape_.hidden_size) {
    norm_of(hidden, weights_.final_norm, shape_.hidden_size,
            [out](std::size_t i, f32x16 values) { store(out + i, values); });
  }
}

// What becomes of a panel's products before they are logits.
void Decoder::change_logits(std::size_t panel, f32x16& left, f32x16& right) const {
  if (!weights_.head_bias.empty()) {
    const float* bias = &weights_.head_bias[panel * kPanel];
    left += load<f32x16>(bias), right += load<f32x16>(bias + kLanes);
  }
  const float multiplier = shape_.logits_multiplier, soft_cap = shape_.logits_soft_cap;
  if (multiplier != 1.0f) left *= multiplier, right *= multiplier;
  if (soft_cap > 0) left = capped(left, soft_cap), right = capped(right, soft_cap);
}

// put(row, panel, left half, right half) takes the logits of what `forward` gave, then() is called by all members.
template <class Put, class Then>
void Decoder::multiply_lm_head(const float* hidden, int num_rows, Put&& put, Then&& then) {
  // The products below have one row at least.
  if (num_rows == 0) return;
  const std::size_t size = shape_.hidden_size;
  reserve(num_rows);
  Operation norms, products;
  auto norm_row = [&](std::size_t row) {
    norm_of(hidden + row * size, weights_.final_norm, size,
            [&](std::size_t i, f32x16 values) { normed_.put(row, i, values); });
    normed_.quantize(row, size);
  };
  last_ns_ = now_ns();
  team_.run([&] {
    norms.share(num_rows, kRowsPerPiece, norm_row);
    multiply_shared(products, team_.size(), weights_.lm_head, normed_.rows(num_rows, size), put,
                    [this] { lap(Part::lm_head); });
    then();
  });
}

void Decoder::logits(const float* hidden, int num_rows, float* out) {
  const std::size_t vocab = shape_.vocab_size, stride = num_ids();
  float* own = out + first_id();
  auto put = [&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    change_logits(panel, left, right);
    const std::size_t first = panel * kPanel;
    float* to = own + row * stride + first;
    if (first + kPanel <= vocab) {
      store(to, left);
      store(to + kLanes, right);
      return;
    }
    for (std::size_t i = 0; first + i < vocab; i++) to[i] = i < kLanes ? left[i] : right[i - kLanes];
  };
  multiply_lm_head(hidden, num_rows, put, [] {});
  if (is_vocab_split()) gather_logits(out, num_rows);
}

// Those of other members, who get its own, as many rows at a time as slots hold.
void Decoder::gather_logits(float* logits, std::size_t num_rows) {
  const std::vector<std::int32_t>& starts = peers_.vocab_starts;
  const Meeting& meeting = *peers_.meeting;
  const std::size_t size = meeting.size(), stride = num_ids();
  std::size_t most = 0;
  for (std::size_t member = 0; member < size; member++) {
    most = std::max(most, static_cast<std::size_t>(starts[member + 1] - starts[member]));
  }
  const std::size_t at_once = meeting.slot_bytes() / (most * sizeof(float));
  for (std::size_t first = 0; first < num_rows; first += at_once) {
    const std::size_t count = std::min(at_once, num_rows - first);
    Operation giving, taking;
    auto give_row = [&](std::size_t row) {
      std::copy_n(logits + (first + row) * stride + first_id(), shape_.vocab_size, slot() + row * most);
    };
    auto take_row = [&](std::size_t item) {
      const std::size_t row = item / size, member = item % size;
      if (static_cast<int>(member) == meeting.number()) return;
      const auto from = reinterpret_cast<const float*>(meeting.part(static_cast<int>(member))) + row * most;
      std::copy_n(from, starts[member + 1] - starts[member], logits + (first + row) * stride + starts[member]);
    };
    team_.run([&] {
      giving.share(count, 1, give_row, [&] { meet(count * most * sizeof(float)); });
      taking.share(count * size, 1, take_row, [this] { lap(Part::add_parts); });
    });
    throw_if_ended();
  }
}

void Decoder::draw_next(const float* hidden, const std::vector<Draw>& draws, std::int32_t* ids) {
  const std::size_t num_panels = weights_.lm_head.num_panels();
  const int num_rows = static_cast<int>(draws.size());
  grow(winners_, num_rows * num_panels);
  auto put = [&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    change_logits(panel, left, right);
    winners_[row * num_panels + panel] =
        best_of(draws[row], left, right, first_id() + static_cast<std::int32_t>(panel * kPanel),
                first_id() + shape_.vocab_size);
  };
  Operation drawing;
  auto best_row = [&](std::size_t row) { return best_of(&winners_[row * num_panels], num_panels); };
  if (!is_vocab_split()) {
    auto draw_row = [&](std::size_t row) { ids[row] = winner(best_row(row)); };
    return multiply_lm_head(hidden, num_rows, put,
                            [&] { drawing.share(num_rows, 1, draw_row, [this] { lap(Part::sample); }); });
  }
  auto draw_row = [&](std::size_t row) { reinterpret_cast<Best*>(slot())[row] = best_row(row); };
  multiply_lm_head(hidden, num_rows, put, [&] {
    drawing.share(num_rows, 1, draw_row, [&] {
      lap(Part::sample);
      meet(num_rows * sizeof(Best));
    });
  });
  throw_if_ended();
  const Meeting& meeting = *peers_.meeting;
  std::vector<Best> found(meeting.size());
  for (int row = 0; row < num_rows; row++) {
    for (int member = 0; member < meeting.size(); member++) {
      found[member] = reinterpret_cast<const Best*>(meeting.part(member))[row];
    }
    ids[row] = winner(best_of(found.data(), found.size()));
  }
}

void Decoder::draw(const float* logits, const std::vector<Draw>& draws, std::int32_t* ids) {
  const std::int32_t vocab = num_ids();
  const std::size_t num_parts = (vocab + kIdsPerPiece - 1) / kIdsPerPiece, num_pieces = draws.size() * num_parts;
  grow(winners_, num_pieces);
  auto draw_part = [&](std::size_t item) {
    const std::size_t row = item / num_parts;
    const auto begin = static_cast<std::int32_t>(item % num_parts) * kIdsPerPiece;
    winners_[item] = best_of(draws[row], logits + row * vocab, begin, std::min(begin + kIdsPerPiece, vocab));
  };
  last_ns_ = now_ns();
  Operation drawing;
  auto draw_all = [&] { drawing.share(num_pieces, 1, draw_part, [this] { lap(Part::sample); }); };
  num_pieces <= kMaxPiecesAlone ? draw_all() : team_.run(draw_all);
  for (std::size_t row = 0; row < draws.size(); row++)
    ids[row] = winner(best_of(&winners_[row * num_parts], num_parts));
}

}  // namespace eventlm
