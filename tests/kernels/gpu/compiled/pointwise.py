"""Kernels that move memory and compute little: norms, gates, embeddings, stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from eventlm.kernels.gpu.block_tables import cache_slots, write_blocks
from eventlm.kernels.gpu.embed_tokens import embed_tokens
from eventlm.kernels.gpu.gates import gelu_mul, silu_mul
from eventlm.kernels.gpu.qkv_store import qkv_store
from eventlm.kernels.gpu.rms_norm import add_rms_norm, rms_norm

Launch = tuple[str, Callable[[], object]]


def launches() -> Iterator[Launch]:
    """One for each configuration of each kernel."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
        yield f"rms_norm {dtype}", partial(rms_norm, x, weight, 1e-5)
        yield f"add_rms_norm {dtype}", partial(add_rms_norm, x, x.clone(), weight, 1e-5)
        yield f"silu_mul {dtype}", partial(silu_mul, x)
        yield f"gelu_mul tanh {dtype}", partial(gelu_mul, x, "tanh")
        yield f"gelu_mul none {dtype}", partial(gelu_mul, x, "none")
        integers = torch.zeros(3, dtype=torch.int32)
        yield f"embed_tokens {dtype}", partial(embed_tokens, integers, integers, x, x.clone())
        yield f"qkv_store {dtype}", partial(_qkv_store, dtype)
    for hidden_size in (576, 5120, 16384):
        x = torch.zeros(3, hidden_size, dtype=torch.bfloat16)
        yield f"add_rms_norm {hidden_size}", partial(add_rms_norm, x, x.clone(), x[0], 1e-5)
    updates = torch.zeros(9, 3, dtype=torch.int32)
    yield "write_blocks", partial(write_blocks, updates, 5, updates)
    numbers = torch.zeros(64, dtype=torch.int32)
    yield "cache_slots", partial(cache_slots, numbers, numbers, torch.zeros(8, 64, dtype=torch.int32), 16)
    for heads, head_dim in (((9, 3), 64), ((64, 8), 128), ((32, 32), 80), ((16, 8), 256)):
        yield f"qkv_store {heads} {head_dim} normed", partial(_qkv_store, heads=heads, head_dim=head_dim, normed=True)
    yield "qkv_store fp8", partial(_qkv_store, cache_dtype=torch.float8_e4m3fn)
    yield "qkv_store fp8 normed", partial(_qkv_store, normed=True, cache_dtype=torch.float8_e4m3fn)


def _qkv_store(
    dtype: torch.dtype = torch.bfloat16,
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    normed: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> None:
    num_heads, num_kv_heads = heads
    cache = torch.zeros(2, 3, num_kv_heads, 16, head_dim, dtype=cache_dtype or dtype)
    table = torch.zeros(9, head_dim // 2, dtype=dtype)
    weight: Tensor | None = torch.zeros(head_dim, dtype=dtype) if normed else None
    qkv_store(
        torch.zeros(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
        table,
        table,
        weight,
        weight,
        1e-5,
        cache,
        None if cache_dtype is None else torch.zeros(cache.shape[:-1]),
        num_heads,
    )
