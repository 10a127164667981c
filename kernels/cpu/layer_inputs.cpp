// What each layer adds to the residual stream of a token by its id and its embedding.
#include "decoder.h"
#include "pointwise.h"

namespace eventlm {

// Those of all layers, [layers][inputs_size] of a token: what is looked up, and the norm of a product.
void Decoder::make_inputs(Operation* operation, const Step& step, float multiplier) {
  const std::size_t size = shape_.inputs_size, num_inputs = size * shape_.num_layers, panels = size / kPanel;
  const float root = std::sqrt(static_cast<float>(size));
  auto look_up = [&](std::size_t token) {
    const std::int32_t id = step.token_ids[token];
    float* to = &inputs_[token * inputs_stride_];
    if (weights_.inputs_embedding == nullptr) {
      weights_.packed_inputs_embedding.unpack(id, to);
    } else {
      const bf16* from = weights_.inputs_embedding + id * num_inputs;
      for (std::size_t i = 0; i < num_inputs; i += kLanes) store(to + i, load_bf16(from + i));
    }
    for (std::size_t i = 0; i < num_inputs; i += kLanes) store(to + i, load<f32x16>(to + i) * root);
  };
  operation[0].share(step.num_tokens, 1, look_up, [this] { lap(Part::layer_inputs); });
  alignas(64) float sums[kBlockRows * kMaxHeadDim];
  auto put = [&](int row, std::size_t panel, f32x16 left, f32x16 right) {
    float* products = sums + row % kBlockRows * size;
    store(products + panel % panels * kPanel, left * multiplier);
    store(products + panel % panels * kPanel + kLanes, right * multiplier);
    if (panel % panels < panels - 1) return;
    float* to = &inputs_[row * inputs_stride_ + panel / panels * size];
    norm_of(products, weights_.inputs_norm, size,
            [&](std::size_t i, f32x16 values) { store(to + i, (load<f32x16>(to + i) + values) * std::sqrt(0.5f)); });
  };
  const Rows rows = normed_.rows(static_cast<int>(step.num_tokens), shape_.hidden_size);
  multiply_shared(
      operation[1], team_.size(), weights_.inputs_projection, rows, put, [this] { lap(Part::layer_inputs); }, panels);
}

// The gate of a layer's inputs, and those themselves.
void Decoder::multiply_input(Operation& operation, const Instruction& now, int num_rows) {
  const std::size_t first = static_cast<std::size_t>(now.layer) * now.num_neurons;
  auto put = [&, this](int row, std::size_t panel, f32x16 left, f32x16 right) {
    const float* inputs = &inputs_[row * inputs_stride_ + first + panel * kPanel];
    inner_.put(row, panel * kPanel, activated(now.activation, left) * load<f32x16>(inputs));
    inner_.put(row, panel * kPanel + kLanes, activated(now.activation, right) * load<f32x16>(inputs + kLanes));
  };
  multiply_shared(operation, team_.size(), weights_.layers[now.layer].input_gate,
                  normed_.rows(num_rows, shape_.hidden_size), put, [this] { lap(Part::layer_inputs); });
}

}  // namespace eventlm
