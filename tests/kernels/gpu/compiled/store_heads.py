"""Storing keys and values, in a cache of their type and of fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from eventlm.kernels.gpu.store_heads import store_heads


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """With heads of an odd size, too."""
    slots = torch.zeros(3, dtype=torch.int64)
    for head_dim in (80, 128):
        heads = torch.zeros(3, 2, head_dim, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            cache = torch.zeros(2, 4, 2, 16, head_dim, dtype=dtype)
            scales = torch.zeros(cache.shape[:-1]) if dtype == torch.float8_e4m3fn else None
            yield f"head {head_dim} {dtype}", partial(store_heads, heads, heads, slots, cache, scales)
