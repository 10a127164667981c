"""Prefill attention with heads of usual and of odd shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eventlm.kernels.gpu.prefill_attention import prefill_attention


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of models in bfloat16, with caches of the same and of fp8."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for head_dim, group in ((16, 2), (64, 1), (64, 7), (80, 4), (128, 1), (128, 4), (128, 8), (256, 2)):
            yield f"head {head_dim} group {group} {dtype}", functools.partial(_prefill, dtype, head_dim, group)
        # As gpt-oss and Gemma 2 have it.
        sinks = torch.zeros(16, dtype=torch.bfloat16)
        yield f"sinks {dtype}", functools.partial(_prefill, dtype, 64, 8, window=128, sinks_H=sinks)
        yield f"soft cap {dtype}", functools.partial(_prefill, dtype, 256, 2, window=4096, soft_cap=50.0)


def _prefill(dtype: torch.dtype, head_dim: int, group: int, **options: Any) -> None:
    num_kv_heads, block_size = 2, 16
    q = torch.zeros(40, num_kv_heads * group, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, num_kv_heads, block_size, head_dim, dtype=dtype)
    prefill_attention(
        q,
        cache,
        torch.zeros(cache.shape[:-1]) if dtype == torch.float8_e4m3fn else None,
        torch.zeros(4, 8, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(5, 2, dtype=torch.int32),
        scale=0.1,
        out_THD=torch.empty_like(q),
        **options,
    )
