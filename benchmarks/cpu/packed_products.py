"""Time of the products with matrices of codes, beside the time that reading the same bytes takes.

    python benchmarks/cpu/packed_products.py [--types Q4_K Q6_K] [--rows 1 8 32] [--threads N] [--build NAME]

The matrices are those of a Qwen3-0.6B, all of one type; `int8` and `bf16` are the other ways to hold them. A row's time
is that of all products of a step, as the compiled forward pass counts it. Bytes are those of a GGUF file, the limit is
one pass over as many, by as many threads, in the same run. Times are the least of some steps. Shared machines change
speed within seconds: read ratios.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable, Sequence

import torch

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.decoder import CpuDecoder, DecoderRow, DrawRows, KVLayers
from eventlm.kernels.cpu.native import PACKED_TYPES, available_builds
from eventlm.models.cpu_kernels import native_model
from eventlm.models.rope import compiled_angles
from eventlm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.system.processors import usable_cores
from eventlm.table import table

LAYER = LayerSpec(
    attention=AttentionSpec(
        num_heads=16, num_kv_heads=8, head_dim=128, rope=RopeSpec(rotary_dim=128), scale=128**-0.5, qk_norm="head"
    ),
    feed_forward=FeedForwardSpec(size=3072),
)
MODEL = ModelSpec(
    architecture="",
    vocab_size=151936,
    hidden_size=1024,
    layers=(LAYER,) * 28,
    norm=NormSpec(eps=1e-6),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    dtype="bfloat16",
)
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
NUM_STEPS = 6


def load(build: str, kind: str, num_threads: int) -> CpuDecoder:
    """With random codes; their bytes are so small that no scale is infinite."""
    shapes = {key: shape for key, shape in model_weights(MODEL).items() if len(shape) == 2}
    packed = PACKED_TYPES.get(kind)
    types = {(key.name, key.layer, key.expert): kind for key in shapes} if packed else None
    ropes = [compiled_angles(rope, 64) for rope in MODEL.ropes]
    model = native_model(MODEL)
    decoder = CpuDecoder(build, model, ropes, is_int8=kind == "int8", types=types, num_threads=num_threads)
    for key, (num_out, num_in) in shapes.items():
        for first in range(0, num_out, 4096):
            num_rows = min(4096, num_out - first)
            if packed:
                blocks = torch.randint(0, 48, (num_rows, packed.row_bytes(num_in)), dtype=torch.uint8)
                if kind == "MXFP4":
                    # Powers of two so small that products are not normal numbers would be slow.
                    blocks[:, :: packed.block_bytes] += 100
                decoder.load_packed(key.name, key.layer, blocks, first)
            else:
                decoder.load(key.name, key.layer, torch.rand(num_rows, num_in) - 0.5, first)
    return decoder


def products_ms(decoder: CpuDecoder, num_rows: int, kv: KVLayers) -> float:
    """Of a step of so many sequences, each at its first token."""
    rows = [DecoderRow(0, 1, array("i", [row])) for row in range(num_rows)]
    draw = DrawRows([0.0] * num_rows, [0] * num_rows, [0] * num_rows)
    best = float("inf")
    for _ in range(NUM_STEPS):
        before = decoder.times_ns()
        decoder.draw_next(decoder.forward(range(num_rows), rows, kv), draw)
        after = decoder.times_ns()
        best = min(best, sum(after[part] - before[part] for part in PRODUCTS) / 1e6)
    return best


def least_ms(action: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def measure(build: str, kind: str, all_rows: Sequence[int], num_threads: int) -> list[str]:
    """A row of the table."""
    decoder = load(build, kind, num_threads)
    num_bytes = sum(decoder.weight_bytes.values())
    memory = host_memory.empty((num_bytes // 4,), torch.float32).fill_(1.0)
    kv = KVLayers(list(torch.zeros(28, 2, max(all_rows), 8, 16, 128, dtype=torch.bfloat16)))
    read_ms = least_ms(lambda: torch.dot(memory, memory))
    times = [products_ms(decoder, num_rows, kv) for num_rows in all_rows]
    cells = [cell for ms in times for cell in (f"{ms:.1f}", f"{ms / read_ms:.2f}")]
    return [kind, f"{num_bytes / 1e6:.0f}", f"{read_ms:.1f}", *cells]


def main() -> None:
    """Measure what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*PACKED_TYPES, "int8", "bf16"]
    parser.add_argument("--types", nargs="+", choices=kinds, default=kinds, metavar="TYPE")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--build", choices=available_builds(), default=available_builds()[0])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [measure(options.build, kind, options.rows, options.threads) for kind in options.types]
    print(f"{options.build}, {options.threads} threads; ms for all products, and x the time of reading their bytes")
    headings = ["type", "MB", "read ms", *(text for count in options.rows for text in (f"{count} rows", "x read"))]
    print("\n".join(table(headings, rows)))


if __name__ == "__main__":
    main()
