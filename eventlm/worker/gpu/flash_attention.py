"""Attention by the flash-attn package (Dao, 2023), where it is installed: an extra, never needed."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from eventlm.worker.gpu.attention import AttentionRows, Geometry
from eventlm.worker.gpu.cache import GpuCache

#: Its blocks of keys must be a multiple of this.
_BLOCK_MULTIPLE = 256


class FlashAttention:
    """Its paged interface takes the cache as it is, seen with the tokens of a block before its heads."""

    tile_queries = 0
    tiles_decodes = False
    can_be_captured = True

    @classmethod
    def refusal(cls, geometry: Geometry) -> str:
        """What its kernels cannot do."""
        if geometry.is_invariant:
            return "its results depend on the batch (--batch-invariant)"
        if geometry.block_size % _BLOCK_MULTIPLE:
            wanted = f"KV blocks of a multiple of {_BLOCK_MULTIPLE} tokens"
            return f"it wants {wanted}, not {geometry.block_size} (--block-size)"
        if geometry.kv_dtype not in ("bfloat16", "float16") or geometry.dtype == torch.float32:
            return f"it computes in bfloat16 and float16 only, and keys and values are {geometry.kv_dtype}"
        if any(each.window or each.soft_cap or each.has_sinks for each in geometry.attentions.values()):
            return "windows, soft caps and sinks are not implemented for it here"
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        return ""

    def __init__(self, geometry: Geometry) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._with_kvcache, self._varlen = flash_attn_with_kvcache, flash_attn_varlen_func
        self._attentions = geometry.attentions

    def begin(self, cache: GpuCache, step: AttentionRows) -> None:
        """Gather the block tables of the rows."""
        self._cache, self._step = cache, step
        self._tables_RB = step.block_tables[step.slots_R.clamp(min=0)]
        prompts = step.rows[step.num_decodes :]
        if prompts:
            lengths = step.lengths_R[step.num_decodes :]
            self._key_starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            self._max_queries = max(row.num_tokens for row in prompts)
            self._max_keys = max(row.start + row.num_tokens for row in prompts)

    def attend(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Decodes, then prompts."""
        step, num_decodes, scale = self._step, self._step.num_decodes, self._attentions[layer].scale
        keys, values = self._cache.layer(layer)[0].transpose(2, 3)
        parts = []
        if num_decodes:
            parts.append(
                self._with_kvcache(
                    q_THD[:num_decodes, None],
                    keys,
                    values,
                    cache_seqlens=step.lengths_R[:num_decodes],
                    block_table=self._tables_RB[:num_decodes],
                    softmax_scale=scale,
                    causal=True,
                )[:, 0]
            )
        if step.query_starts_R1 is not None:
            parts.append(
                self._varlen(
                    q_THD[num_decodes:],
                    keys,
                    values,
                    cu_seqlens_q=step.query_starts_R1[num_decodes:] - num_decodes,
                    cu_seqlens_k=self._key_starts,
                    max_seqlen_q=self._max_queries,
                    max_seqlen_k=self._max_keys,
                    softmax_scale=scale,
                    causal=True,
                    block_table=self._tables_RB[num_decodes:],
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
