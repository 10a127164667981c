"""Time of a step's experts, beside the time that reading the matrices of the chosen ones takes.

    python benchmarks/cpu/expert_products.py [--types bf16 Q4_K] [--rows 1 8 32] [--threads N] [--build NAME]

The layers are those of a Qwen3-30B-A3B, with 8 of 128 experts for a token, but only two of them. A step's time is that
of the router and the experts, as the compiled forward pass counts it. Bytes are those of the router and of all experts
that a row of the step has chosen; the limit is reading as many, by as many threads, at the speed of the fastest of some
passes over other memory, between the steps. Steps have other tokens each, so that no cache has their experts, and the
one nearest to its limit counts. Shared machines change speed within seconds: read ratios.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderRow, KVLayers
from eventlm.kernels.cpu.native import PACKED_TYPES, available_builds
from eventlm.models.cpu_kernels import native_model
from eventlm.models.experts import route
from eventlm.models.rope import compiled_angles
from eventlm.models.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.system.processors import usable_cores
from eventlm.table import table

NUM_LAYERS = 2
EXPERTS = ExpertsSpec(num_experts=128, num_active=8, expert=FeedForwardSpec(size=768))
# Attention is not measured, and small. What a layer adds to the residual stream is multiplied by 0, so that which
# experts a token passes follows from its embedding.
ATTENTION = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, rope=RopeSpec(rotary_dim=16), scale=0.25)
MODEL = ModelSpec(
    architecture="",
    vocab_size=4096,
    hidden_size=2048,
    layers=(LayerSpec(attention=ATTENTION, feed_forward=EXPERTS, residual_multiplier=0.0),) * NUM_LAYERS,
    norm=NormSpec(eps=1e-6),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
NUM_STEPS = 200
#: Of the memory that is read to see how fast that is, and of one pass.
MEMORY_BYTES, READ_BYTES = 1 << 29, 1 << 26


class Bench:
    """A decoder with random weights, or codes, whose bytes are so small that no scale is infinite."""

    def __init__(self, build: str, kind: str, num_threads: int) -> None:
        packed = PACKED_TYPES.get(kind)
        shapes = {key: shape for key, shape in model_weights(MODEL).items() if len(shape) == 2}
        types = {(key.name, key.layer, key.expert): kind for key in shapes if packed and key.expert >= 0}
        ropes = [compiled_angles(rope, 64) for rope in MODEL.ropes]
        self.decoder = CpuDecoder(
            build, native_model(MODEL), ropes, is_int8=kind == "int8", types=types, num_threads=num_threads
        )
        self._weights = {"router": torch.randn(128, 2048) * 0.1, "embedding": torch.randn(4096, 2048).bfloat16()}
        values = torch.rand(2048, 2048) - 0.5
        for key, (num_out, num_in) in shapes.items():
            if packed and key.expert >= 0:
                num_bytes = num_in // packed.block_inputs * packed.block_bytes
                blocks = torch.randint(0, 48, (num_out, num_bytes), dtype=torch.uint8)
                self.decoder.load_packed(key.name, key.layer, blocks, expert=key.expert)
            else:
                weight = self._weights.get(key.name, values[:num_out, :num_in])
                self.decoder.load(key.name, key.layer, weight, expert=key.expert)
        self._kv = KVLayers([torch.zeros(2, 64, 1, 16, 16, dtype=torch.bfloat16) for _ in range(NUM_LAYERS)])

    def num_bytes(self, token_ids: Sequence[int]) -> int:
        """Of the router and the experts of a step with these tokens."""
        x_TH = self._weights["embedding"][list(token_ids)].float()
        normed_TH = x_TH * x_TH.square().mean(-1, keepdim=True).rsqrt()
        chosen = route(EXPERTS, normed_TH @ self._weights["router"].T, None)
        counted = self.decoder.weight_bytes
        return counted["router"] + counted["experts"] * len(chosen.experts_TA.unique()) // EXPERTS.num_experts

    def step_ms(self, token_ids: Sequence[int]) -> float:
        """Of a step of as many sequences, each at its first token."""
        rows = [DecoderRow(0, 1, array("i", [row])) for row in range(len(token_ids))]
        before = self.decoder.times_ns()
        self.decoder.forward(token_ids, rows, self._kv)
        after = self.decoder.times_ns()
        return sum(after[part] - before[part] for part in ("router", "experts")) / 1e6


def read_ms(memory: Tensor) -> float:
    """By all of torch's threads."""
    start = time.perf_counter()
    torch.dot(memory, memory)
    return (time.perf_counter() - start) * 1e3


def measure(build: str, kind: str, all_rows: Sequence[int], num_threads: int) -> list[str]:
    """A row of the table."""
    bench = Bench(build, kind, num_threads)
    memory = host_memory.empty((MEMORY_BYTES // 4,), torch.float32).fill_(1.0).view(-1, READ_BYTES // 4)
    cells = []
    for num_rows in all_rows:
        steps = []
        least_ms = float("inf")
        for step in range(NUM_STEPS):
            token_ids = range(step * num_rows, (step + 1) * num_rows)
            least_ms = min(least_ms, read_ms(memory[step % len(memory)]))
            num_bytes, ms = bench.num_bytes(token_ids), bench.step_ms(token_ids)
            steps.append((ms / num_bytes, num_bytes, ms))
        ms_of_byte, num_bytes, ms = min(steps)
        cells += [f"{num_bytes / 1e6:.0f}", f"{ms:.2f}", f"{ms_of_byte * READ_BYTES / least_ms:.2f}"]
    return [kind, *cells]


def main() -> None:
    """Measure what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*PACKED_TYPES, "int8", "bf16"]
    parser.add_argument("--types", nargs="+", choices=kinds, default=["Q4_0", "Q4_K", "int8", "bf16"], metavar="TYPE")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--build", choices=available_builds(), default=available_builds()[0])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(options.build, kind, options.rows, options.threads) for kind in options.types]
    print(f"{options.build}, {options.threads} threads; router and experts of a step, and x the time of reading them")
    headings = ["type", *(text for count in options.rows for text in (f"MB, {count} rows", "ms", "x read"))]
    print("\n".join(table(headings, rows)))


if __name__ == "__main__":
    main()
