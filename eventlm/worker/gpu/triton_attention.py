"""Attention by the project's own Triton kernels: decodes split over their keys, prompts in tiles of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from eventlm.kernels.gpu.decode_attention import SplitScratch, decode_attention, num_splits
from eventlm.kernels.gpu.prefill_attention import prefill_attention, tile_queries
from eventlm.worker.gpu.attention import AttentionRows, Geometry
from eventlm.worker.gpu.cache import GpuCache


class TritonAttention:
    """See `eventlm.kernels.gpu.decode_attention` and `prefill_attention`.

    If results must not depend on the batch, decodes take the way of prompts: how their keys are split would depend on
    how many rows there are.
    """

    can_be_captured = True

    @classmethod
    def refusal(cls, geometry: Geometry) -> str:
        """It runs all models."""
        return ""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        is_gpu = geometry.device.type == "cuda"
        self._num_processors = torch.cuda.get_device_properties(geometry.device).multi_processor_count if is_gpu else 4
        #: Rows times splits of the step that has most of them.
        most = max(rows * self._splits_of(rows, geometry.max_context) for rows in range(1, geometry.max_rows + 1))
        self._scratch = SplitScratch(most, geometry.num_heads, geometry.head_dim, geometry.device)
        cache_dtype = torch.float8_e4m3fn if geometry.kv_dtype == "fp8" else geometry.dtype
        self.tile_queries = tile_queries(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, cache_dtype)
        self.tiles_decodes = geometry.is_invariant
        self._rows = torch.arange(geometry.max_rows + 1, dtype=torch.int32, device=geometry.device)

    def _splits_of(self, num_rows: int, max_context: int) -> int:
        """Of the longest context that there can be, so that it depends on the number of rows alone."""
        return num_splits(num_rows, self._geometry.num_kv_heads, self._num_processors, max_context)

    def begin(self, cache: GpuCache, step: AttentionRows) -> None:
        """Find out how decodes are split, or make tiles of them."""
        self._cache, self._step = cache, step
        if self.tiles_decodes:
            self._step = step if step.tiles_N2 is not None else self._as_prompts(step)
            return
        # A run's first worker is made for any context that the model can have, those after it, and those that execute
        # the run again, for what the cache had room for; all must sum alike.
        max_context = min(self._geometry.max_context, (cache.num_blocks - 1) * self._geometry.block_size)
        self._num_splits = self._splits_of(max(step.num_decodes, 1), max_context)
        self._parts = self._scratch.of_step(step.num_decodes, self._num_splits)

    def _as_prompts(self, step: AttentionRows) -> AttentionRows:
        """Decodes as prompts of one token. Padding becomes the first token of any sequence."""
        rows = self._rows[: step.num_decodes + 1]
        tiles_N2 = torch.stack((rows[:-1], torch.zeros_like(rows[:-1])), dim=1)
        return step._replace(
            slots_R=step.slots_R.clamp(min=0),
            starts_R=(step.lengths_R - 1).clamp(min=0),
            query_starts_R1=rows,
            tiles_N2=tiles_N2,
        )

    def attend(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Decodes, then prompts."""
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if self._step.num_decodes and not self.tiles_decodes:
            self._attend_decodes(layer, q_THD, sinks_H, out_THD)
        if self._step.tiles_N2 is not None:
            self._attend_prompts(layer, q_THD, sinks_H, out_THD)
        return out_THD

    def _attend_decodes(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None, out_THD: Tensor) -> None:
        step, num_rows, spec = self._step, self._step.num_decodes, self._geometry.attentions[layer]
        kv, scales = self._cache.layer(layer)
        decode_attention(
            q_THD[:num_rows],
            kv,
            scales,
            step.block_tables,
            step.slots_R[:num_rows],
            step.lengths_R[:num_rows],
            step.order_D,
            scale=spec.scale,
            num_splits=self._num_splits,
            parts=self._parts,
            out_RHD=out_THD[:num_rows],
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_H=sinks_H,
        )

    def _attend_prompts(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None, out_THD: Tensor) -> None:
        step, spec = self._step, self._geometry.attentions[layer]
        assert step.starts_R is not None
        assert step.query_starts_R1 is not None
        assert step.tiles_N2 is not None
        kv, scales = self._cache.layer(layer)
        prefill_attention(
            q_THD,
            kv,
            scales,
            step.block_tables,
            step.slots_R,
            step.starts_R,
            step.query_starts_R1,
            step.tiles_N2,
            scale=spec.scale,
            out_THD=out_THD,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_H=sinks_H,
        )
