"""Attention in torch's operations, over keys and values that are gathered for each layer: slow, and simple."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention
from eventlm.worker.batch import tail_slots
from eventlm.worker.gpu.attention import AttentionRows, Geometry
from eventlm.worker.gpu.cache import GpuCache


class SdpaAttention:
    """See `eventlm.kernels.paged_attention`."""

    tile_queries = 0
    tiles_decodes = False
    can_be_captured = False

    @classmethod
    def refusal(cls, geometry: Geometry) -> str:
        """What it was not made for."""
        if geometry.is_invariant:
            return "its results depend on the batch (--batch-invariant)"
        if geometry.kv_dtype == "fp8":
            return "it does not read keys and values in fp8"
        return ""

    def __init__(self, geometry: Geometry) -> None:
        self._attentions = geometry.attentions
        self._windows = {attention.window for attention in geometry.attentions.values()}
        self._dtype = geometry.dtype
        self._block_size = geometry.block_size

    def begin(self, cache: GpuCache, step: AttentionRows) -> None:
        """Sort the rows into groups. Whole blocks are read, so what is after a row in its last block must be finite."""
        self._cache = cache
        cache.clear_slots(torch.from_numpy(tail_slots(step.rows, self._block_size)))
        rows = [
            AttentionRow(row.start, row.num_tokens, np.array(row.sequence.block_table, dtype=np.int32))
            for row in step.rows
        ]
        self._groups = plan_attention(rows, cache.kv[0], self._dtype, self._windows)

    def attend(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """All rows."""
        spec = self._attentions[layer]
        out_THD: Tensor = paged_attention(
            q_THD.contiguous(),
            self._cache.kv[layer],
            self._groups,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_H=sinks_H,
        )
        return out_THD
