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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eventlm.kernels.kv_quantization import dequantize, is_quantized


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
    mask: added to the scores, [B, 1, N, L]; None if every row starts at 0, or all are decodes of equal
    length.
    """

    num_rows: int
    num_queries: int
    num_context: int
    queries: Tensor
    valid: Tensor | None
    outputs: Tensor | None
    blocks: Tensor
    context: Tensor
    mask: Tensor | None


def plan_attention(
    rows: Sequence[AttentionRow], kv_cache: Tensor, dtype: torch.dtype | None = None
) -> list[AttentionGroup]:
    """Group the rows of a step, whose tokens lie one row after the other. `kv_cache` is any layer's.

    dtype: of the queries; None: the cache's.

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
    return [_plan_group(members, kv_cache, dtype or kv_cache.dtype) for members in groups.values()]


def paged_attention(q_THD: Tensor, kv_cache: Tensor, groups: Sequence[AttentionGroup], *, scale: float) -> Tensor:
    """Causal attention of each row's queries over its blocks.

    q_THD: [T, H, D]. kv_cache: one layer's [2, num_blocks, K, block_size, D], as `kv_store` takes. Returns [T, H, D].
    """
    if len(groups) == 1 and groups[0].valid is None:
        return _attend(q_THD, kv_cache, groups[0], scale)
    out_THD = torch.empty_like(q_THD)
    for group in groups:
        out = _attend(q_THD[group.queries], kv_cache, group, scale)
        if group.valid is None or group.outputs is None:
            out_THD.index_copy_(0, group.queries, out)
        else:
            out_THD.index_copy_(0, group.outputs, out[group.valid])
    return out_THD


def _attend(q: Tensor, kv_cache: Tensor, group: AttentionGroup, scale: float) -> Tensor:
    """q: [B * N, H, D] in the group's order; returns the same."""
    num_rows, num_queries, num_context = group.num_rows, group.num_queries, group.num_context
    _, _, num_kv_heads, _, width = kv_cache.shape
    _, num_heads, head_dim = q.shape
    for cache, context in zip(kv_cache.flatten(3).flatten(1, 2), group.context, strict=True):
        torch.index_select(cache, 0, group.blocks, out=context)
    context = group.context.view(2, num_rows, num_kv_heads, -1, width)[:, :, :, :num_context]
    keys, values = dequantize(context, q.dtype) if is_quantized(kv_cache) else context.to(q.dtype)
    if num_queries == 1:
        # The heads that share a key stand in for query tokens, so that no key is copied.
        q = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = scaled_dot_product_attention(q, keys, values, group.mask, scale=scale)
        return out.reshape(num_rows, num_heads, head_dim)
    q = q.view(num_rows, num_queries, num_heads, head_dim).transpose(1, 2)
    out = scaled_dot_product_attention(
        q, keys, values, group.mask, is_causal=group.mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(num_rows * num_queries, num_heads, head_dim)


def _plan_group(members: list[tuple[int, AttentionRow]], kv_cache: Tensor, dtype: torch.dtype) -> AttentionGroup:
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
        mask=_mask(starts, num_queries, num_context, dtype, device),
    )


def _mask(
    starts: np.ndarray, num_queries: int, num_context: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """0 where query i of a row sees context j, that is j <= start + i, else minus infinity."""
    if not starts.any() or (num_queries == 1 and (starts == starts[0]).all()):
        return None
    last_seen = torch.from_numpy(starts).to(device)[:, None] + torch.arange(num_queries, device=device)
    hidden = torch.arange(num_context, device=device) > last_seen[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
