"""Norm, rotation and store of query, key and value of Qwen3-8B's shape.

Bytes are those of all heads once in and once out, of the rows of the rotation's tables, and of the scales of fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import qkv_store_reference
from eventlm.kernels.gpu.qkv_store import qkv_store

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
EPS = 1e-6


class Step(NamedTuple):
    """What `qkv_store` takes, and one tensor of all that it writes (of the cache alone, if that is of fp8)."""

    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    weight: Tensor
    kv_cache: Tensor
    kv_scales: Tensor | None
    written: Tensor


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Few tokens, of which the launch is most, and prefills, into a cache of either kind."""
    # Triton's interpreter loses carries in fp8.
    for cache_dtype in (torch.bfloat16,) if smoke else (torch.bfloat16, torch.float8_e4m3fn):
        for num_tokens in (3,) if smoke else (1, 256, 8192):
            step = make_step(num_tokens, cache_dtype, device)
            yield KernelCase(
                name=f"qkv_store {str(cache_dtype).removeprefix('torch.')} T={num_tokens}",
                run=partial(_apply, qkv_store, step),
                reference=partial(_apply, qkv_store_reference, make_step(num_tokens, cache_dtype, device)),
                num_bytes=_num_bytes(step),
                # Triton's interpreter cuts bfloat16 off, five times on the way.
                tolerance=2e-2,
                target=0.7 if num_tokens == 8192 else 0.0,
                prepare=partial(_restore, step.qkv, step.qkv.clone()),
            )


def make_step(num_tokens: int, cache_dtype: torch.dtype, device: torch.device) -> Step:
    """Tokens of random contents at random places of a cache that is just large enough."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    scales_shape = (2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE)
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(4096, HEAD_DIM // 2, generator=generator).to(device) * 6
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens]
    cache_numel = 2 * num_blocks * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    memory = torch.zeros(num_tokens * width + cache_numel, dtype=torch.bfloat16, device=device)
    qkv = memory[: num_tokens * width].view(num_tokens, width)
    kv_cache = memory[num_tokens * width :].view(*scales_shape, HEAD_DIM)
    quantized = cache_dtype != torch.bfloat16
    if quantized:
        kv_cache = torch.zeros_like(kv_cache).to(cache_dtype)
    return Step(
        qkv=qkv.copy_(torch.randn(num_tokens, width, generator=generator)),
        positions=torch.arange(num_tokens, dtype=torch.int32, device=device) % len(angles),
        slots=slots.to(device),
        cos=angles.cos().bfloat16(),
        sin=angles.sin().bfloat16(),
        weight=torch.linspace(0.5, 1.5, HEAD_DIM, device=device).bfloat16(),
        kv_cache=kv_cache,
        kv_scales=torch.zeros(scales_shape, device=device) if quantized else None,
        written=kv_cache if quantized else memory,
    )


def _num_bytes(step: Step) -> int:
    num_tokens, head_bytes = len(step.qkv), HEAD_DIM * step.qkv.itemsize
    stored = 2 * NUM_KV_HEADS * (HEAD_DIM * step.kv_cache.itemsize + (4 if step.kv_scales is not None else 0))
    return step.qkv.nbytes + num_tokens * (NUM_HEADS * head_bytes + stored + head_bytes)


def _apply(function: Callable[..., None], step: Step) -> Tensor:
    tables = (step.positions, step.slots, step.cos, step.sin, step.weight, step.weight)
    function(step.qkv, *tables, EPS, step.kv_cache, step.kv_scales, NUM_HEADS)
    return step.written


def _restore(qkv_TN: Tensor, given_TN: Tensor) -> None:
    qkv_TN.copy_(given_TN)
