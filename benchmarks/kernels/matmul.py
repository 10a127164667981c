"""The batch-invariant product with weights of Qwen3-8B: bytes are those of x, weight and result, each once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.tune import Config, Tuning
from eventlm.kernels.gpu.matmul import matmul
from eventlm.kernels.gpu.tuned import tuned

#: What is tried when configurations are measured.
_CANDIDATES = [
    {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP_M": 8,
        "num_warps": warps,
        "num_stages": stages,
        "programs": programs,
    }
    for m, n, k, warps, stages, programs in [
        (128, 256, 64, 8, 3, 1),
        (128, 128, 64, 8, 3, 1),
        (128, 128, 64, 4, 4, 1),
        (128, 64, 64, 4, 4, 2),
        (64, 128, 64, 4, 4, 2),
        (64, 64, 64, 4, 5, 2),
        (64, 64, 128, 4, 4, 1),
        (64, 128, 128, 4, 3, 1),
        (64, 256, 64, 4, 4, 1),
        (64, 32, 128, 4, 4, 2),
    ]
]

#: What each is of, N and K.
WEIGHTS = {"qkv": (6144, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
SMOKE_WEIGHTS = {"qkv": (96, 64)}
#: Configurations are for weights of so many rows, measured with those of so many; None: for all others.
TUNED_ROWS: tuple[tuple[int | None, int], ...] = ((1536, 1024), (4096, 4096), (12_288, 6144), (None, 24_576))


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Decodes, which reading the weight takes, and prefills, which the products take."""
    for name, (N, K) in (SMOKE_WEIGHTS if smoke else WEIGHTS).items():
        weight = _randn(device, N, K) / K**0.5
        for T in (3,) if smoke else (1, 64, 512, 8192):
            x = _randn(device, T, K)
            out = torch.empty(T, N, dtype=x.dtype, device=device)
            yield KernelCase(
                name=f"matmul {name} T={T}",
                run=partial(matmul, x, weight, out_TN=out),
                reference=partial(_reference, x, weight),
                num_bytes=x.nbytes + weight.nbytes + out.nbytes,
                num_flops=2 * T * N * K,
                peer=partial(torch.nn.functional.linear, x, weight),
                peer_name="torch, not batch-invariant",
                peer_target=0.7 if T >= 64 else 0.0,
            )


def tunings(device: torch.device, *, smoke: bool) -> Iterator[Tuning]:
    """One for weights of few rows and of many: T has no part in it, so a decode and a prefill are measured for each."""
    for most, N in ((None, 96),) if smoke else TUNED_ROWS:
        K = 64 if smoke else 4096
        weight = _randn(device, N, K) / K**0.5
        batches = [_randn(device, T, K) for T in ((3,) if smoke else (64, 2048))]
        bound = {} if most is None else {"max_N": most}
        yield Tuning(
            name=f"matmul N={N} K={K}",
            op="matmul",
            shapes=[{"dtype": dtype, **bound} for dtype in ("bfloat16", "float16")],
            current=tuned("matmul", dtype="bfloat16", N=N, K=K),
            candidates=_CANDIDATES[:1] if smoke else _CANDIDATES,
            runs=[partial(_run, x, weight) for x in batches],
            references=[partial(_reference, x, weight) for x in batches],
        )


def _run(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    return matmul(x, weight, config=config)


def _reference(x: Tensor, weight: Tensor) -> Tensor:
    return x.float() @ weight.float().T


def _randn(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device).bfloat16()
