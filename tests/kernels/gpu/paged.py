"""Sequences in a paged cache, and attention over them in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class PagedSequences(NamedTuple):
    """A cache as kernels take it, and the keys and values in it, float64 [L, K, D] a sequence."""

    kv_cache: Tensor
    kv_scales: Tensor | None
    block_tables: Tensor
    slots: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def paged_sequences(
    lengths: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 1,
) -> PagedSequences:
    """Random keys and values, blocks and slots in no order; all that no sequence has is NaN, and its block too far."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    free = chance.sample(range(num_blocks), num_blocks)
    slots = chance.sample(range(len(lengths) + 2), len(lengths))
    cache = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), torch.nan)
    scales = torch.full(cache.shape[:-1], torch.nan)
    tables = torch.full((len(lengths) + 2, max(counts, default=0) + 2), 2**30, dtype=torch.int32)
    keys, values = [], []
    for length, count, slot in zip(lengths, counts, slots, strict=True):
        blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        tables[slot, :count] = blocks
        new = torch.randn(2, length, num_kv_heads, head_dim, generator=generator)
        new[1] += torch.arange(length)[:, None, None] % 3
        new_scales = torch.ones(new.shape[:-1])
        if dtype == FP8:
            new_scales = new.abs().amax(-1) / 448 * (1 + torch.rand(new.shape[:-1], generator=generator))
            new = (new / new_scales[..., None]).to(FP8).float()
        else:
            new = new.to(dtype).float()
        indices = torch.arange(length)
        cache[:, blocks[indices // block_size], :, indices % block_size] = new.transpose(0, 1)
        scales[:, blocks[indices // block_size], :, indices % block_size] = new_scales.transpose(0, 1)
        for part, real in zip((keys, values), new.double() * new_scales.double()[..., None], strict=True):
            part.append(real)
    return PagedSequences(
        cache.to(device, dtype),
        scales.to(device) if dtype == FP8 else None,
        tables.to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        [part.to(device) for part in keys],
        [part.to(device) for part in values],
    )


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [N, H, D] at `start` and on; keys, values: [L, K, D]. In float64."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    indices = torch.arange(len(keys), device=q.device)
    places = start + indices[: len(q), None]
    visible = indices <= places
    if window:
        visible &= indices > places - window
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H.double()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(dim=-1)[..., : len(keys)], values)


def extras(num_heads: int, device: torch.device) -> list[dict[str, Any]]:
    """What models may have of attention besides: windows of less than a tile and of more, caps, sinks, and all."""
    sinks = torch.linspace(-1.0, 4.0, num_heads, device=device)
    return [
        {"window": 9},
        {"window": 150},
        {"soft_cap": 2.0},
        {"sinks_H": sinks},
        {"window": 40, "soft_cap": 3.0, "sinks_H": sinks.bfloat16()},
    ]
