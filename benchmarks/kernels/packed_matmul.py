"""Products with codes of 4 and 8 bits, in shapes of Qwen3-8B and of gpt-oss's experts: bytes are those of x, of the
codes with their scales (of experts, of those that have rows) and of the result, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.grouped_gemm import Shape, expert_offsets
from benchmarks.kernels.references import grouped_gemm_reference, packed_values
from benchmarks.kernels.tune import Config, Tuning
from eventlm.kernels.gpu.code_types import CODE_TYPES
from eventlm.kernels.gpu.packed_matmul import packed_matmul
from eventlm.kernels.gpu.packed_weight import PackedWeight, empty_packed
from eventlm.kernels.gpu.tuned import tuned

#: What is tried when configurations are measured.
_CANDIDATES: list[Config] = [
    {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    for m, n, warps, stages in [
        (16, 32, 4, 4),
        (16, 64, 4, 4),
        (16, 128, 4, 3),
        (32, 64, 4, 4),
        (32, 128, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 8, 3),
        (128, 128, 8, 3),
    ]
]
#: Outputs and inputs. Of the small one, the last unit of inputs is a half.
GATE_UP, SMOKE = (24_576, 4096), (48, 96)
GPT_OSS_20B, SMOKE_EXPERTS = Shape(32, 4, 2880, 2880), Shape(4, 2, 96, 24)
#: Configurations are for batches of so many rows, measured at these; None: for more, and for all with
#: `--batch-invariant`.
TUNED_ROWS: tuple[tuple[int | None, tuple[int, ...]], ...] = ((16, (1, 16)), (None, (64, 2048)))
#: What configurations are measured with, as one serves all types.
_TUNED_KINDS = ("I4_128", "Q8_0")


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """All types of codes; decodes, which reading the codes takes, and prefills, which the products take."""
    N, K = SMOKE if smoke else GATE_UP
    for kind in CODE_TYPES:
        weight = _weight(device, kind, N, K)
        values = packed_values(weight).bfloat16()
        for T in (3,) if smoke else (1, 64, 2048):
            x = _randn(device, T, K)
            yield KernelCase(
                name=f"packed_matmul {kind} T={T}",
                run=partial(packed_matmul, x, weight),
                reference=partial(_reference, x, weight),
                num_bytes=x.nbytes + weight.nbytes + 2 * T * N,
                num_flops=2 * T * N * K,
                peer=partial(linear, x, values),
                peer_name="torch in bfloat16",
            )
    shape = SMOKE_EXPERTS if smoke else GPT_OSS_20B
    N, K = shape.weights["gate_up"]
    weight = _weight(device, "MXFP4", shape.num_experts, N, K)
    for num_tokens in (5,) if smoke else (1, 64, 2048):
        offsets = expert_offsets(shape, num_tokens, device)
        x = _randn(device, num_tokens * shape.top_k, K)
        num_used = int((offsets.diff() > 0).sum())
        yield KernelCase(
            name=f"packed_matmul experts, {num_tokens} tokens",
            run=partial(packed_matmul, x, weight, offsets_E1=offsets),
            reference=partial(_experts_reference, x, weight, offsets),
            num_bytes=x.nbytes + num_used * weight.of_expert(0).nbytes + 2 * len(x) * N,
            num_flops=2 * len(x) * N * K,
        )


def tunings(device: torch.device, *, smoke: bool) -> Iterator[Tuning]:
    """One for each range of rows."""
    N, K = SMOKE if smoke else GATE_UP
    weights = [_weight(device, kind, N, K) for kind in _TUNED_KINDS]
    for most, counts in ((None, (3,)),) if smoke else TUNED_ROWS:
        pairs = [(_randn(device, T, K), weight) for weight in weights for T in counts]
        yield Tuning(
            name=f"packed_matmul, {' and '.join(map(str, counts))} rows",
            op="packed_matmul",
            shapes=[{} if most is None else {"max_rows": most}],
            current=tuned("packed_matmul", rows=counts[-1]),
            candidates=_CANDIDATES[:1] if smoke else _CANDIDATES,
            runs=[partial(_run, x, weight) for x, weight in pairs],
            references=[partial(_reference, x, weight) for x, weight in pairs],
        )


def _weight(device: torch.device, kind: str, *shape: int) -> PackedWeight:
    """Codes of all values, scales of 0.01 to 0.02, and shifts that leave the numbers around zero."""
    weight = empty_packed(kind, *shape, device=device)
    generator = torch.Generator(device).manual_seed(1)
    weight.codes.random_(0, 256, generator=generator)
    weight.scales.uniform_(0.01, 0.02, generator=generator)
    if weight.shifts is not None:
        half = 1 << (weight.code_type.bits - 1)
        weight.shifts.fill_(-0.015 * half if weight.code_type.shift == "added" else half)
    return weight


def _run(x: Tensor, weight: PackedWeight, config: Config) -> Tensor:
    return packed_matmul(x, weight, config=config)


def _reference(x: Tensor, weight: PackedWeight) -> Tensor:
    return x.float() @ packed_values(weight).T


def _experts_reference(x: Tensor, weight: PackedWeight, offsets: Tensor) -> Tensor:
    return grouped_gemm_reference(x.float(), packed_values(weight), offsets, max_rows=len(x))


def _randn(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
