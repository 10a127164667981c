"""Keys and values of Qwen3-8B's shape into the cache: bytes are those of each once in and once out, and of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.qkv_store import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Step, make_step
from benchmarks.kernels.references import store_heads_reference
from eventlm.kernels.gpu.store_heads import store_heads


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Few tokens, of which the launch is most, and prefills, into a cache of either kind."""
    # Triton's interpreter loses carries in fp8.
    for cache_dtype in (torch.bfloat16,) if smoke else (torch.bfloat16, torch.float8_e4m3fn):
        for num_tokens in (3,) if smoke else (1, 256, 8192):
            step = make_step(num_tokens, cache_dtype, device)
            scale_bytes = 4 if step.kv_scales is not None else 0
            head_bytes = HEAD_DIM * (step.qkv.itemsize + step.kv_cache.itemsize) + scale_bytes
            yield KernelCase(
                name=f"store_heads {str(cache_dtype).removeprefix('torch.')} T={num_tokens}",
                run=partial(_apply, store_heads, step),
                reference=partial(_apply, store_heads_reference, make_step(num_tokens, cache_dtype, device)),
                num_bytes=2 * num_tokens * NUM_KV_HEADS * head_bytes,
            )


def _apply(function: Callable[..., None], step: Step) -> Tensor:
    heads = step.qkv.unflatten(1, (-1, HEAD_DIM))[:, NUM_HEADS:]
    keys, values = heads.split(NUM_KV_HEADS, dim=1)
    function(keys, values, step.slots, step.kv_cache, step.kv_scales)
    return step.kv_cache
