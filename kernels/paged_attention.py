"""Attention of a ragged batch over keys and values in blocks.

A step mixes decodes (one query token over a long context) with prefill chunks (many over whatever precedes
them). `plan_attention` sorts its rows into groups of similar shape, once a step; `paged_attention` then runs
one padded scaled-dot-product call a group and layer. The keys and values of the step itself must be in the
cache before (see `kv_store`), those of all rows before any attention, since a row may read blocks that
another row of its step fills.

Shapes: T tokens of the step, B rows of a group, N query tokens and L context tokens a row (padded to the
group's longest), H query heads, K key-value heads, G = H / K, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eventlm.kernels.kv_quantization import dequantize, is_quantized
from eventlm.kernels.pointwise import cap_softly


class AttentionRow(NamedTuple):
    """Query tokens at `start` to `start + num_tokens` of a sequence with blocks `block_table`, 32-bit."""

    start: int
    num_tokens: int
    block_table: np.ndarray


class AttentionGroup(NamedTuple):
    """Rows that are computed together.

    queries: [B * N] int64, the position in the step's tokens of each query; padding repeats token 0.
    valid, outputs: where the real queries lie in [B * N], and their positions in the step's tokens; None if all
    of `queries` is real.
    blocks: [B * K * blocks] int64, rows of the cache as [num_blocks * K]; padding repeats the row's first block.
    context: [2, B * K * blocks, block_size x what a token's head has in the cache], room for the gathered keys and
    values, the same for all layers.
    masks: by window, 0 being none: added to the scores, [B, 1, N, L]; None if a query sees all before it, and every row
    starts at 0, or all are decodes of equal length.
    """

    num_rows: int
    num_queries: int
    num_context: int
    queries: Tensor
    valid: Tensor | None
    outputs: Tensor | None
    blocks: Tensor
    context: Tensor
    masks: dict[int, Tensor | None]


def plan_attention(
    rows: Sequence[AttentionRow],
    kv_cache: Tensor,
    dtype: torch.dtype | None = None,
    windows: Collection[int] = (0,),
) -> list[AttentionGroup]:
    """Group the rows of a step, whose tokens lie one row after the other. `kv_cache` is any layer's.

    dtype: of the queries; None: the cache's. windows: those that `paged_attention` will be called with.

    Rows share a group if their numbers of query tokens and of context blocks have the same power of two above
    them, so padding at most doubles either.
    """
    block_size = kv_cache.shape[3]
    groups: dict[tuple[int, int], list[tuple[int, AttentionRow]]] = {}
    offset = 0
    for row in rows:
        num_blocks = -(-(row.start + row.num_tokens) // block_size)
        shape = ((row.num_tokens - 1).bit_length(), (num_blocks - 1).bit_length())
        groups.setdefault(shape, []).append((offset, row))
        offset += row.num_tokens
    return [_plan_group(members, kv_cache, dtype or kv_cache.dtype, windows) for members in groups.values()]


def paged_attention(
    q_THD: Tensor,
    kv_cache: Tensor,
    groups: Sequence[AttentionGroup],
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of each row's queries over its blocks.

    q_THD: [T, H, D]. kv_cache: one layer's [2, num_blocks, K, block_size, D], as `kv_store` takes. scale, window,
    soft_cap: as `eventlm.models.spec.AttentionSpec` has them. sinks_H: scores that take part in the softmax and have no
    value. Returns [T, H, D].
    """
    attend = partial(_attend, kv_cache=kv_cache, scale=scale, window=window, soft_cap=soft_cap, sinks_H=sinks_H)
    if len(groups) == 1 and groups[0].valid is None:
        return attend(q_THD, group=groups[0])
    out_THD = torch.empty_like(q_THD)
    for group in groups:
        out = attend(q_THD[group.queries], group=group)
        if group.valid is None or group.outputs is None:
            out_THD.index_copy_(0, group.queries, out)
        else:
            out_THD.index_copy_(0, group.outputs, out[group.valid])
    return out_THD


def _attend(
    q: Tensor,
    *,
    kv_cache: Tensor,
    group: AttentionGroup,
    scale: float,
    window: int,
    soft_cap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """q: [B * N, H, D] in the group's order; returns the same."""
    num_rows, num_queries, num_context = group.num_rows, group.num_queries, group.num_context
    _, _, num_kv_heads, _, width = kv_cache.shape
    _, num_heads, head_dim = q.shape
    for cache, context in zip(kv_cache.flatten(3).flatten(1, 2), group.context, strict=True):
        torch.index_select(cache, 0, group.blocks, out=context)
    context = group.context.view(2, num_rows, num_kv_heads, -1, width)[:, :, :, :num_context]
    keys, values = dequantize(context, q.dtype) if is_quantized(kv_cache) else context.to(q.dtype)
    mask = group.masks[window]
    if soft_cap or sinks_H is not None:
        q = q.view(num_rows, num_queries, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        out = _softmax_attention(q, keys, values, mask, scale, soft_cap, sinks_H)
        return out.permute(0, 3, 1, 2, 4).reshape(num_rows * num_queries, num_heads, head_dim)
    if num_queries == 1:
        # The heads that share a key stand in for query tokens, so that no key is copied.
        q = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = scaled_dot_product_attention(q, keys, values, mask, scale=scale)
        return out.reshape(num_rows, num_heads, head_dim)
    q = q.view(num_rows, num_queries, num_heads, head_dim).transpose(1, 2)
    out = scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(num_rows * num_queries, num_heads, head_dim)


def _softmax_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float, sinks_H: Tensor | None
) -> Tensor:
    """What torch's function cannot do, in float32. q: [B, K, G, N, D]; keys, values: [B, K, L, D]; returns like q."""
    num_queries, num_context = q.shape[-2], keys.shape[-2]
    scores = (q.float() @ keys.float().transpose(-1, -2)[:, :, None]).mul_(scale)
    if cap:
        cap_softly(scores, cap)
    if mask is not None:
        scores += mask[:, :, None]
    elif num_queries > 1:
        scores += torch.full((num_queries, num_context), -torch.inf, device=q.device).triu_(1)
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, *q.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_context]
    return (weights @ values.float()[:, :, None]).to(q.dtype)


def _plan_group(
    members: list[tuple[int, AttentionRow]], kv_cache: Tensor, dtype: torch.dtype, windows: Collection[int]
) -> AttentionGroup:
    device, num_rows = kv_cache.device, len(members)
    _, _, num_kv_heads, block_size, width = kv_cache.shape
    offsets = np.array([offset for offset, _ in members])
    starts = np.array([row.start for _, row in members])
    counts = np.array([row.num_tokens for _, row in members])
    num_queries, num_context = int(counts.max()), int((starts + counts).max())
    indices = np.arange(num_queries)
    is_real = indices < counts[:, None]
    queries = np.where(is_real, offsets[:, None] + indices, 0).ravel()
    blocks = np.empty((num_rows, -(-num_context // block_size)), dtype=np.int64)
    for number, (_, row) in enumerate(members):
        own = row.block_table[: -(-(row.start + row.num_tokens) // block_size)]
        blocks[number, : len(own)] = own
        blocks[number, len(own) :] = own[0]
    head_blocks = blocks[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]
    valid = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real)).to(device)
    outputs = None if valid is None else torch.from_numpy(queries[is_real.ravel()]).to(device)
    return AttentionGroup(
        num_rows=num_rows,
        num_queries=num_queries,
        num_context=num_context,
        queries=torch.from_numpy(queries).to(device),
        valid=valid,
        outputs=outputs,
        blocks=torch.from_numpy(head_blocks.ravel()).to(device),
        context=kv_cache.new_empty(2, head_blocks.size, block_size * width),
        masks={window: _mask(starts, num_queries, num_context, window, dtype, device) for window in windows},
    )


def _mask(
    starts: np.ndarray, num_queries: int, num_context: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """0 where query i of a row sees context j, that is j <= start + i, and with a window j > start + i - window, else
    minus infinity.
    """
    is_cut = 0 < window < num_context
    if not is_cut and (not starts.any() or (num_queries == 1 and (starts == starts[0]).all())):
        return None
    places = torch.arange(num_context, device=device)
    last_seen = (torch.from_numpy(starts).to(device)[:, None] + torch.arange(num_queries, device=device))[:, :, None]
    hidden = places > last_seen
    if is_cut:
        hidden |= places <= last_seen - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
