"""Work given to the team of threads asks for no memory: there is nobody who could say that there is none."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from eventlm.kernels.cpu import native

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "kernels/cpu"

#: Whole models, int8 and not, with keys and values in each format: prompts, decodes, contexts of several passes, draws
#: that are shared out; and the operations for models that transformers computes. The team is one member, which counts
#: what it asks for while it works.
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <new>

#include "decoder.h"
#include "paged_attention.h"
#include "products.h"

using namespace eventlm;

bool is_inside = false;
int num_inside = 0, num_outside = 0;

void* operator new(std::size_t size) { return ++(is_inside ? num_inside : num_outside), std::malloc(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto to = static_cast<std::size_t>(alignment);
  return ++(is_inside ? num_inside : num_outside), std::aligned_alloc(to, (size + to - 1) / to * to);
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, std::size_t) noexcept { std::free(at); }
void operator delete(void* at, std::align_val_t) noexcept { std::free(at); }
void operator delete(void* at, std::size_t, std::align_val_t) noexcept { std::free(at); }

void Operation::wait() const {}
Team::Team(int, int) {}
Team::~Team() {}
void Team::run(const std::function<void()>& work) noexcept {
  is_inside = true;
  work();
  is_inside = false;
}

constexpr int kTokens = 1040, kPrompt = 300, kBlocks = kTokens / 16, kRows = 30;
// 80 inputs are no whole blocks of 64.
constexpr Shape kShape = {.vocab_size = 100, .hidden_size = 80, .num_layers = 4,
                          .is_tied = 1, .is_layer_norm = 0, .inputs_size = 32, .inputs_vocab_size = 100, .eps = 1e-5f,
                          .logits_multiplier = 0.5f, .logits_soft_cap = 30};
constexpr int kHeadDim = 32;

// A plain layer, one of other operations, and two that keep a state.
std::vector<Instruction> make_program() {
  std::vector<Instruction> program;
  auto add = [&](Kind kind, int layer, Weight weight = {}) -> Instruction& {
    Instruction now = {};
    now.kind = kind, now.layer = layer, now.weight = weight, now.multiplier = 1, now.score_divisor = 5;
    if (kind == Kind::heads || kind == Kind::attend) now.num_heads = 2, now.num_kv_heads = 1, now.head_dim = kHeadDim;
    if (kind == Kind::heads) now.num_value_heads = 1;
    return program.emplace_back(now);
  };
  add(Kind::embed, 0);
  add(Kind::take, 0);
  add(Kind::inputs, 0);
  add(Kind::norm, 0, Weight::attention_norm);
  Instruction& first = add(Kind::heads, 0);
  first.rotary_dim = 32, first.num_turned = 16, first.num_value_heads = 0, first.has_value_norm = 1;
  add(Kind::attend, 0);
  add(Kind::multiply_add, 0, Weight::output);
  add(Kind::norm, 0, Weight::feed_forward_norm);
  Instruction& gated = add(Kind::activate, 0);
  gated.num_neurons = 48, gated.is_gated = 1;
  add(Kind::multiply_add, 0, Weight::down);
  add(Kind::take, 0);
  add(Kind::activate_input, 0).num_neurons = kShape.inputs_size;
  add(Kind::multiply, 0, Weight::input_up);
  add(Kind::add_normed, 0, Weight::input_out_norm);
  add(Kind::scale, 0);
  add(Kind::take, 1);
  Instruction& heads = add(Kind::heads, 1);
  heads.qk_norm = QkNorm::whole, heads.rope = 1, heads.rotary_dim = 16, heads.num_turned = 8, heads.is_interleaved = 1;
  heads.positions_per_scale = 64, heads.query_scaling_beta = 0.1f;
  Instruction& attend = add(Kind::attend, 1);
  attend.window = 50, attend.soft_cap = 20;
  add(Kind::multiply, 1, Weight::output);
  add(Kind::add_normed, 1, Weight::attention_out_norm);
  Instruction route = {};
  route.kind = Kind::route, route.layer = 1, route.multiplier = 1;
  route.num_experts = 6, route.num_active = 3, route.num_groups = 3, route.num_active_groups = 2;
  program.push_back(route);
  Instruction& ungated = add(Kind::activate, 1);
  ungated.num_neurons = 33, ungated.activation = Activation::gelu;
  add(Kind::scale_inner, 1);
  add(Kind::multiply, 1, Weight::down);
  add(Kind::keep, 1, Weight::shared_out_norm);
  Instruction& experts = add(Kind::experts, 1);
  experts.num_experts = 6, experts.num_active = 3, experts.num_neurons = 17;
  experts.is_gated = 1, experts.activation = Activation::swiglu_oai;
  add(Kind::add_kept, 1, Weight::experts_out_norm);
  add(Kind::add_normed, 1, Weight::feed_forward_out_norm);
  add(Kind::add, 1);
  Instruction& convolve = add(Kind::convolve, 2);
  convolve.num_channels = 96, convolve.num_taps = 3;
  add(Kind::multiply_add, 2, Weight::output);
  Instruction& delta = add(Kind::delta, 3);
  delta.num_channels = 128, delta.num_taps = 4, delta.state = 2 * 96;
  delta.num_key_heads = 1, delta.num_value_heads = 2, delta.key_dim = 32, delta.value_dim = 32;
  add(Kind::multiply_add, 3, Weight::output);
  return program;
}

int count_inside(Inputs kind, KVFormat format, bool has_peers) {
  const std::vector<bf16> ones(kShape.vocab_size * kShape.hidden_size, 0x3f80);
  const std::vector<bf16> inputs(kShape.inputs_vocab_size * kShape.num_layers * kShape.inputs_size, 0x3f80);
  const std::vector<float> angles(kTokens * kHeadDim / 2, 0.5f);
  const float* tables[] = {angles.data(), angles.data()};
  std::vector<TypedWeight> types;
  if (kind == Inputs::packed) types.push_back({Weight::output, 0, -1, PackedType::q4_1});
  // Of a group, the only member.
  constexpr std::size_t kSlotBytes = kTokens * 256 * sizeof(float);
  Aligned<char> segment(SharedMeeting::segment_bytes(1, kSlotBytes));
  SharedMeeting meeting(segment.data(), 1, 0, kSlotBytes, 0);
  const Peers peers = has_peers ? Peers{&meeting, {0, kShape.vocab_size}} : Peers{};
  Decoder decoder(kShape, make_program(), tables, tables, kind == Inputs::int8, types, peers, Sharers{}, 1);
  decoder.load_matrix(Weight::embedding, 0, -1, ones.data(), 0, kShape.vocab_size);
  for (int layer = 0; layer < 2; layer++) {
    const int num_neurons = layer == 0 ? 48 : 33;
    auto load = [&](Weight weight, int num_rows) { decoder.load_matrix(weight, layer, -1, ones.data(), 0, num_rows); };
    load(Weight::query, 64);
    load(Weight::key, 32);
    if (layer == 1) load(Weight::value, 32);
    load(Weight::output, kShape.hidden_size);
    if (layer == 0) load(Weight::gate, num_neurons);
    load(Weight::up, num_neurons);
    load(Weight::down, kShape.hidden_size);
  }
  decoder.set_embedding(Weight::inputs_embedding, inputs.data());
  decoder.load_vector(Weight::expert_scale, false, 1, -1, angles.data());
  decoder.load_vector(Weight::sinks, false, 1, -1, angles.data());
  decoder.load_vector(Weight::shared_scale, false, 1, -1, angles.data());
  const std::vector<std::int32_t> ids(kTokens, 99);
  std::vector<std::int32_t> blocks;
  for (int block = 0; block < kBlocks; block++) blocks.push_back(block);
  std::vector<std::uint8_t> kv(2 * kTokens * KVCache::token_bytes(format, kHeadDim)), second = kv;
  std::uint8_t* layers[] = {kv.data(), second.data(), nullptr, nullptr};
  constexpr std::size_t kStateSize = 2 * 96 + 3 * 128 + 2 * 32 * 32;
  std::vector<float> memory(3 * kStateSize);
  const StateCopy copy{1, 2};
  std::vector<float> hidden(kTokens * kShape.hidden_size), logits(kRows * kShape.vocab_size);
  auto run = [&](int start, int count) {
    const States states{memory.data(), kStateSize, {{1, start == 0 ? -1 : 0, 1, &copy}}};
    decoder.forward(ids.data(), {{start, count, blocks.data()}}, 0, {layers, format, kBlocks, 16}, states, nullptr,
                    hidden.data());
  };
  run(0, kPrompt);
  // Those between are zeros.
  run(kTokens - 1, 1);
  decoder.logits(hidden.data(), kRows, logits.data());
  const std::vector<Draw> draws(kRows, Draw(1.0f, 7, 0));
  std::vector<std::int32_t> drawn(kRows);
  decoder.draw(logits.data(), draws, drawn.data());
  decoder.draw_next(hidden.data(), draws, drawn.data());
  // Two steps, each with its tokens and seven sums; logits and a draw.
  const bool has_met = meeting.num_meetings() == 2 * 8 + 2;
  if (has_met != has_peers) num_inside++, std::printf("%d meetings\\n", static_cast<int>(meeting.num_meetings()));
  return num_inside;
}

// Operations for models that torch computes the rest of, on rows enough to be shared out.
int count_inside_products() {
  constexpr int kSize = 48, kHeads = 2, kRows = kTokens;
  Products products(kSize, 1);
  Matrix matrix;
  matrix.num_out = 33, matrix.num_in = kSize;
  Aligned<char> memory(matrix.num_bytes());
  matrix.set_memory(memory.data());
  const std::vector<bf16> ones(kRows * kHeads * kHeadDim, 0x3f80);
  const std::vector<float> weight(kSize, 1.0f);
  std::vector<bf16> out(kRows * kHeads * kHeadDim);
  products.pack(matrix, ones.data(), 0, 33);
  products.multiply({{memory.data(), 33, weight.data(), out.data()}}, kSize, ones.data(), kRows);
  // These may ask for none at all.
  const Heads heads{ones.data(), kHeadDim, kHeads * kHeadDim};
  const int before = num_outside;
  products.norm(ones.data(), kRows, kSize, weight.data(), 1e-5f, out.data());
  products.rotate(heads, kRows, kHeads, kHeadDim, ones.data(), ones.data(), out.data());
  num_inside += num_outside - before;
  std::vector<std::int32_t> blocks;
  for (int block = 0; block < kBlocks; block++) blocks.push_back(block);
  std::vector<std::uint8_t> kv(2 * kTokens * KVCache::token_bytes(KVFormat::bf16, kHeadDim));
  std::uint8_t* layer = kv.data();
  const KVStorage storage{&layer, KVFormat::bf16, kBlocks, 16};
  PagedAttention attention(products.team());
  auto attend = [&](int start, int count) {
    attention.begin({{start, count, blocks.data()}});
    attention.attend({kHeads, 1, kHeadDim, kHeadDim, kHeadDim, 0}, storage.layer(0, 1, kHeadDim), heads,
                     {ones.data(), 0, kHeadDim}, {ones.data(), 0, kHeadDim}, 0.5f, 0.0f, nullptr, out.data());
  };
  attend(0, kTokens - 1);
  attend(kTokens - 1, 1);
  return num_inside;
}

int main() {
  std::printf("products: %d\\n", count_inside_products());
  for (Inputs inputs : {Inputs::bf16, Inputs::int8, Inputs::packed}) {
    for (KVFormat format : {KVFormat::bf16, KVFormat::int8, KVFormat::fp8}) {
      const int count = count_inside(inputs, format, false);
      std::printf("inputs %d, format %d: %d\\n", static_cast<int>(inputs), static_cast<int>(format), count);
    }
  }
  std::printf("with peers: %d\\n", count_inside(Inputs::bf16, KVFormat::bf16, true));
  return num_inside != 0 || num_outside == 0;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_work_asks_for_no_memory(tmp_path: Path) -> None:
    # As one file the headers are compiled once, and without optimisation no request can be left out.
    names = (
        "decoder",
        "experts",
        "layer_inputs",
        "lm_head",
        "meeting",
        "packed",
        "packed_product",
        "recurrent",
        "weights",
    )
    (tmp_path / "main.cpp").write_text("".join(f'#include "{name}.cpp"\n' for name in names) + PROGRAM)
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-Wno-psabi",
        f"-I{FOLDER}",
        tmp_path / "main.cpp",
        # They have constants of the same names as others.
        FOLDER / "paged_attention.cpp",
        FOLDER / "products.cpp",
        "-o",
        tmp_path / "program",
    ]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("build", native.BUILDS)
def test_builds_have_no_memory_that_a_thread_makes_at_its_first_use(build: str) -> None:
    """Where there is none for that, the process ends."""
    library = FOLDER / f"{build}.abi3.so"
    if not library.exists():
        pytest.skip(f"{build} is not compiled")
    content = library.read_bytes()
    # Of the file's program headers, in ELF of 64 bits.
    begin, size, count = struct.unpack_from("<32xQ14xHH", content)
    kinds = {struct.unpack_from("<I", content, begin + number * size)[0] for number in range(count)}
    load, thread_local = 1, 7
    assert load in kinds
    assert thread_local not in kinds
