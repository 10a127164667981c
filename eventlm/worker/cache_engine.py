"""The keys and values of all sequences on a worker, in blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eventlm.errors import EventLMError
from eventlm.kernels import host_memory
from eventlm.kernels.kv_quantization import SCALE_BYTES, STORED_DTYPES
from eventlm.kernels.kv_store import head_slots, kv_store
from eventlm.kernels.paged_attention import AttentionGroup, AttentionRow, paged_attention, plan_attention
from eventlm.models.config import kv_bytes_per_token
from eventlm.models.spec import AttentionSpec, ModelSpec


class CacheMemoryError(EventLMError):
    """The KV cache does not fit into memory."""


class CacheEngine:
    """The cache tensor [layers, 2, num_blocks, kv_heads, block_size, W], keys first.

    W is head_dim, or for `kv_dtype` int8 and fp8 the bytes of `eventlm.kernels.kv_quantization`. dtype: of queries.
    """

    def __init__(
        self,
        config: ModelSpec,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        width = config.head_dim + (SCALE_BYTES if kv_dtype in STORED_DTYPES else 0)
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, width)
        try:
            self.kv = _zeros(shape, STORED_DTYPES.get(kv_dtype) or getattr(torch, kv_dtype), device)
        except (RuntimeError, MemoryError, ValueError) as error:
            mebibytes = num_blocks * block_size * kv_bytes_per_token(config, kv_dtype) >> 20
            raise CacheMemoryError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens needs {mebibytes:,} MiB, "
                "more than this machine gives; lower --num-blocks or --kv-memory"
            ) from error
        self._dtype = dtype
        self._attentions = {
            number: layer.attention for number, layer in enumerate(config.layers) if layer.attention is not None
        }
        self._windows = sorted({attention.window for attention in self._attentions.values()})

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take in all layers."""
        _, _, num_blocks, _, block_size, _ = self.kv.shape
        return self.kv.nbytes // (num_blocks * block_size)

    def attention(self, slots_T: Tensor, rows: Sequence[AttentionRow], sinks: Sequence[Tensor | None]) -> StepAttention:
        """The attention of one step, whose tokens' keys and values go into `slots_T`. sinks: see `Decoder.sinks`."""
        _, _, _, num_kv_heads, block_size, _ = self.kv.shape
        slots = head_slots(slots_T, block_size=block_size, num_kv_heads=num_kv_heads)
        groups = plan_attention(rows, self.kv[0], self._dtype, self._windows)
        return StepAttention(self.kv, slots, groups, self._attentions, sinks)

    def clear_slots(self, slots_R: Tensor) -> None:
        """Zero these slots, int64, in all layers.

        Attention reads whole blocks and masks what is after a sequence's end, but 0 x NaN is NaN: a block must not hold
        values that overflowed in a sequence that had it before.
        """
        if slots_R.numel():
            _, _, _, num_kv_heads, block_size, _ = self.kv.shape
            slots = head_slots(slots_R, block_size=block_size, num_kv_heads=num_kv_heads)
            self.kv.flatten(2, 4).flatten(0, 1).index_fill_(1, slots, 0)

    def clear(self, num_blocks: int) -> None:
        """Zero the first `num_blocks` blocks."""
        self.kv[:, :, :num_blocks].zero_()


class StepAttention:
    """Called by each layer of the decoder: stores the step's keys and values, all rows', then attends."""

    def __init__(
        self,
        kv: Tensor,
        slots: Tensor,
        groups: list[AttentionGroup],
        attentions: Mapping[int, AttentionSpec],
        sinks: Sequence[Tensor | None],
    ) -> None:
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._attentions = attentions
        self._sinks = sinks

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        kv_cache, spec = self._kv[layer], self._attentions[layer]
        kv_store(kv_cache, k_TKD, v_TKD, self._slots)
        return paged_attention(
            q_THD,
            kv_cache,
            self._groups,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            sinks_H=self._sinks[layer],
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: padding reads slots that were never written, and 0 x NaN would be NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return host_memory.zeros(shape, dtype)
