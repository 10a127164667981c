"""Decode attention, one split and several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eventlm.kernels.gpu.decode_attention import SplitScratch, decode_attention


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """With heads of usual and of odd shapes."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for head_dim, group, splits in (
            (16, 2, 1),
            (64, 1, 1),
            (64, 8, 4),
            (80, 3, 4),
            (128, 1, 4),
            (128, 4, 64),
            (128, 8, 1),
            (256, 2, 4),
        ):
            name = f"head {head_dim} group {group} splits {splits} {dtype}"
            yield name, functools.partial(_decode, dtype, head_dim, group, splits)
        # As gpt-oss and Gemma 2 have it.
        sinks = torch.zeros(16, dtype=torch.bfloat16)
        yield f"sinks {dtype}", functools.partial(_decode, dtype, 64, 8, 4, window=128, sinks_H=sinks)
        yield f"soft cap {dtype}", functools.partial(_decode, dtype, 256, 2, 4, window=4096, soft_cap=50.0)


def _decode(dtype: torch.dtype, head_dim: int, group: int, splits: int, **options: Any) -> None:
    num_rows, num_kv_heads, block_size = 2, 2, 16
    q = torch.zeros(num_rows, num_kv_heads * group, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(2, 4, num_kv_heads, block_size, head_dim, dtype=dtype)
    decode_attention(
        q,
        cache,
        torch.zeros(cache.shape[:-1]) if dtype == torch.float8_e4m3fn else None,
        torch.zeros(4, 8, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.ones(num_rows, dtype=torch.int32),
        torch.arange(num_rows, dtype=torch.int32),
        scale=0.1,
        num_splits=splits,
        parts=SplitScratch(num_rows * splits, q.shape[1], head_dim, q.device).of_step(num_rows, splits),
        out_RHD=torch.empty_like(q),
        **options,
    )
