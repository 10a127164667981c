"""Attention in torch's operations where a rank has some shards of each context, and others the rest.

Shapes: T tokens of the rank's own rows, row after row, N those of a row, H query heads, K key-value heads, L tokens of
a context that the rank has, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.kv_quantization import dequantize, is_quantized
from eventlm.kernels.paged_attention import AttentionRow
from eventlm.kernels.pointwise import cap_softly
from eventlm.models.spec import AttentionSpec
from eventlm.worker.cache_engine import CacheEngine
from eventlm.worker.ranks.kv_group import GroupStep, KVGroup, OwnRow

#: The maximum of a query that has seen nothing, beside which that weighs nothing. Finite, so that no infinity is
#: subtracted from another.
_NOTHING_SEEN = -1e29


class GroupBatch(NamedTuple):
    """A step's inputs, as `eventlm.worker.batch.Batch` has them, of the rows that a group computes.

    stored_T, whole_T: positions among the tokens of those whose keys and values it stores, in slots_T, and of those of
    `attention_rows`, whose contexts it has whole. shared: (first token, row) of each other row.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    tails_R: Tensor
    stored_T: Tensor
    whole_T: Tensor
    attention_rows: list[AttentionRow]
    shared: list[tuple[int, OwnRow]]


def build_group_batch(step: GroupStep, block_size: int) -> GroupBatch:
    """The arrays of a step."""
    token_ids: list[int] = []
    positions, slots, tails, stored, whole = ([np.empty(0, dtype=np.int64)] for _ in range(5))
    attention_rows, shared = [], []
    for own in step.own:
        row, first, table = own.row, len(token_ids), np.frombuffer(own.blocks, dtype=np.int32)
        token_ids += row.sequence.token_ids[row.start : row.start + row.num_tokens]
        positions.append(np.arange(row.start, row.start + row.num_tokens))
        own_T = np.arange(first, first + row.num_tokens)
        if own.is_stored:
            length = own.num_before + row.num_tokens
            places = np.arange(own.num_before, length)
            stored.append(own_T)
            slots.append(table[places // block_size].astype(np.int64) * block_size + places % block_size)
            if length % block_size and own.num_before <= length - length % block_size:
                block = int(table[length // block_size]) * block_size
                tails.append(np.arange(block + length % block_size, block + block_size))
        if own.first_shared < 0:
            whole.append(own_T)
            attention_rows.append(AttentionRow(row.start, row.num_tokens, table))
        else:
            shared.append((first, own))

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    return GroupBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
        positions_T=joined(positions),
        slots_T=joined(slots),
        tails_R=joined(tails),
        stored_T=joined(stored),
        whole_T=joined(whole),
        attention_rows=attention_rows,
        shared=shared,
    )


class GroupAttention:
    """Called by each layer of the decoder: stores the keys and values of the step's tokens that go here, then attends.

    Of a row that several groups compute, each leaves maximum, sum and output of its shards. What all have left is put
    together in the order of their first shards, in float32, so that all get the same bits.
    """

    def __init__(
        self,
        group: KVGroup,
        cache: CacheEngine,
        batch: GroupBatch,
        num_shared: int,
        attentions: Mapping[int, AttentionSpec],
        sinks: Sequence[Tensor | None],
    ) -> None:
        self._group, self._cache, self._batch, self._num_shared = group, cache, batch, num_shared
        self._attentions, self._sinks = attentions, sinks
        self._inner = cache.attention(batch.slots_T, batch.attention_rows, sinks)
        self._tables = [torch.tensor(own.blocks, dtype=torch.int64) for _, own in batch.shared]
        self._spans = {
            window: [self._span(own, window) for _, own in batch.shared]
            for window in {each.window for each in attentions.values()}
        }

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
        batch = self._batch
        if k_TKD is not None and v_TKD is not None:
            k_TKD, v_TKD = k_TKD[batch.stored_T], v_TKD[batch.stored_T]
        out_THD = torch.empty_like(q_THD)
        out_THD[batch.whole_T] = self._inner(layer, q_THD[batch.whole_T], k_TKD, v_TKD)
        if not self._num_shared:
            return out_THD
        parts = torch.zeros(self._num_shared, q_THD.shape[1], q_THD.shape[2] + 2)
        for number, (first, own) in enumerate(batch.shared):
            given = self._attend(layer, q_THD[first : first + own.row.num_tokens], number)
            parts[own.first_shared : own.first_shared + own.row.num_tokens] = given
        found = self._group.exchange.gather(parts)
        for first, own in batch.shared:
            span = slice(own.first_shared, own.first_shared + own.row.num_tokens)
            merged = merge_parts([found[holder, span] for holder in own.holders])
            out_THD[first : first + own.row.num_tokens] = merged.to(q_THD.dtype)
        return out_THD

    def take_part(self) -> None:
        """In a step of which this group has no row, while others put theirs together."""
        for attention in self._attentions.values():
            self._group.exchange.gather(torch.zeros(self._num_shared, attention.num_heads, attention.head_dim + 2))

    def _span(self, own: OwnRow, window: int) -> tuple[Tensor, Tensor]:
        """Of each token of a row, [N, 1], the first that it sees of what is here, and how many are up to itself."""
        limits = range(own.row.start + 1, own.row.start + own.row.num_tokens + 1)
        firsts = [max(limit - window, 0) if window else 0 for limit in limits]
        first, last = (
            torch.tensor([self._group.num_own(count, own.first_shard) for count in counts])[:, None]
            for counts in (firsts, limits)
        )
        return first, last

    def _attend(self, layer: int, q_NHD: Tensor, number: int) -> Tensor:
        """Maximum, sum and output, float32 [N, H, 2 + D], of the queries of a shared row over what is here."""
        spec, own = self._attentions[layer], self._batch.shared[number][1]
        first_N, limit_N = self._spans[spec.window][number]
        kv_cache = self._cache.layers[layer]
        assert kv_cache is not None
        context = kv_cache[:, self._tables[number]].transpose(1, 2).flatten(2, 3)[:, :, : int(limit_N[-1])]
        keys_KLD, values_KLD = dequantize(context, q_NHD.dtype) if is_quantized(kv_cache) else context.to(q_NHD.dtype)
        num_kv_heads, num_queries = len(keys_KLD), len(q_NHD)
        q = q_NHD.float().transpose(0, 1).reshape(num_kv_heads, -1, q_NHD.shape[2])
        scores = (q @ keys_KLD.float().transpose(-1, -2)).mul_(spec.scale).view(-1, num_queries, keys_KLD.shape[1])
        if spec.soft_cap:
            cap_softly(scores, spec.soft_cap)
        places_L = torch.arange(keys_KLD.shape[1])
        scores.masked_fill_((places_L < first_N) | (places_L >= limit_N), -torch.inf)
        maximum = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:2], 1), 0)
        maximum = maximum.clamp(min=_NOTHING_SEEN)
        sinks_H = self._sinks[layer]
        # A context has them once.
        if has_sinks := sinks_H is not None and own.first_shard == 0:
            assert sinks_H is not None
            maximum = torch.maximum(maximum, sinks_H.float()[:, None, None])
        weights = (scores - maximum).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if has_sinks:
            assert sinks_H is not None
            total += (sinks_H.float()[:, None, None] - maximum).exp()
        output = weights.view(num_kv_heads, -1, keys_KLD.shape[1]) @ values_KLD.float()
        return torch.cat((maximum, total, output.view(*scores.shape[:2], -1)), dim=-1).transpose(0, 1)


def merge_parts(parts: Sequence[Tensor]) -> Tensor:
    """Attention [..., D] over contexts whose parts, one after the other, gave maximum, sum and output, [..., 2 + D]."""
    maximum = parts[0][..., :1]
    for part in parts[1:]:
        maximum = torch.maximum(maximum, part[..., :1])
    total = torch.zeros_like(parts[0][..., 1:])
    for part in parts:
        total += part[..., 1:] * (part[..., :1] - maximum).exp()
    return total[..., 1:] / total[..., :1]
