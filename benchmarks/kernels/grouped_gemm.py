"""The experts of Qwen3-30B-A3B: bytes are those of the experts that have rows, of x and of the result, each once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import grouped_gemm_reference
from benchmarks.kernels.tune import Config, Tuning
from eventlm.kernels.gpu.grouped_gemm import grouped_gemm
from eventlm.kernels.gpu.tuned import tuned

#: What is tried when configurations are measured.
_CANDIDATES = [
    {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "num_warps": warps, "num_stages": stages}
    for m, n, k, warps, stages in [
        (16, 64, 128, 4, 4),
        (16, 128, 64, 4, 4),
        (16, 128, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (32, 128, 64, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
    ]
]

#: Configurations are for batches with so many rows an expert on average, measured at so many; None: for more.
TUNED_ROWS: tuple[tuple[int | None, int], ...] = ((4, 2), (16, 12), (48, 32), (160, 128), (None, 512))


class Shape(NamedTuple):
    """Of a layer of experts: E experts, each token goes to `top_k` of them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """N and K."""
        return {
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


QWEN3_30B_A3B = Shape(128, 8, 2048, 768)
SMOKE = Shape(4, 2, 64, 48)


class _Batch(NamedTuple):
    """What `grouped_gemm` gets, for tokens that go to experts drawn at random."""

    x: Tensor
    weight: Tensor
    offsets: Tensor
    num_tokens: int


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Decodes, which reading the experts takes, and prefills, which the products take."""
    shape = SMOKE if smoke else QWEN3_30B_A3B
    for name, (N, K) in shape.weights.items():
        weight = _randn(device, shape.num_experts, N, K) / K**0.5
        for num_tokens in (5,) if smoke else (1, 16, 64, 512, 8192):
            batch = _batch(shape, weight, num_tokens, device)
            rows = batch.x.shape[0]
            out = torch.empty(rows, N, dtype=batch.x.dtype, device=device)
            num_used = int((batch.offsets.diff() > 0).sum())
            yield KernelCase(
                name=f"grouped_gemm {name}, {num_tokens} tokens",
                run=partial(grouped_gemm, batch.x, weight, batch.offsets, max_rows=num_tokens, out_TN=out),
                reference=partial(_reference, batch),
                num_bytes=batch.x.nbytes + out.nbytes + num_used * weight[0].nbytes,
                num_flops=2 * rows * N * K,
                peer=partial(_peer, batch),
                peer_name="torch's grouped_mm",
                target=0.6 if num_tokens in (64, 8192) else 0.0,
                peer_target=0.9 if num_tokens >= 16 else 0.0,
            )


def tunings(device: torch.device, *, smoke: bool) -> Iterator[Tuning]:
    """One for each range of rows an expert; a configuration serves both matrices of a layer."""
    shape = SMOKE if smoke else QWEN3_30B_A3B
    weights = [_randn(device, shape.num_experts, N, K) / K**0.5 for N, K in shape.weights.values()]
    for most, rows in ((None, 3),) if smoke else TUNED_ROWS:
        num_tokens = rows * shape.num_experts // shape.top_k
        batches = [_batch(shape, weight, num_tokens, device) for weight in weights]
        bound = {} if most is None else {"max_rows": most}
        yield Tuning(
            name=f"grouped_gemm, {rows} rows an expert",
            op="grouped_gemm",
            shapes=[{"dtype": dtype, **bound} for dtype in ("bfloat16", "float16")],
            current=tuned("grouped_gemm", dtype="bfloat16", rows=rows),
            candidates=_CANDIDATES[:1] if smoke else _CANDIDATES,
            runs=[partial(_run, batch) for batch in batches],
            references=[partial(_reference, batch) for batch in batches],
        )


def _batch(shape: Shape, weight: Tensor, num_tokens: int, device: torch.device) -> _Batch:
    offsets = expert_offsets(shape, num_tokens, device)
    return _Batch(_randn(device, num_tokens * shape.top_k, weight.shape[2]), weight, offsets, num_tokens)


def expert_offsets(shape: Shape, num_tokens: int, device: torch.device) -> Tensor:
    """Where the rows of each expert begin, and their end, int32 [E + 1], for experts drawn at random."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator)
    counts = scores.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(device, torch.int32)


def _run(batch: _Batch, config: Config) -> Tensor:
    return grouped_gemm(batch.x, batch.weight, batch.offsets, max_rows=batch.num_tokens, config=config)


def _reference(batch: _Batch) -> Tensor:
    x, weight = batch.x.float(), batch.weight.float()
    return grouped_gemm_reference(x, weight, batch.offsets, max_rows=batch.num_tokens)


def _peer(batch: _Batch) -> Tensor:
    out: Tensor = torch.nn.functional.grouped_mm(batch.x, batch.weight.transpose(1, 2), offs=batch.offsets[1:])
    return out


def _randn(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
