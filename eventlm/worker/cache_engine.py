"""The keys and values of all sequences on a worker, in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from eventlm.errors import EventLMError
from eventlm.kernels.kv_store import head_slots, kv_store
from eventlm.kernels.paged_attention import AttentionGroup, AttentionRow, paged_attention, plan_attention
from eventlm.models.config import DecoderConfig, kv_bytes_per_token


class CacheMemoryError(EventLMError):
    """The KV cache does not fit into memory."""


class CacheEngine:
    """The cache tensor [layers, 2, num_blocks, kv_heads, block_size, head_dim], keys first."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        try:
            self.kv = _zeros(shape, dtype, device)
        except (RuntimeError, MemoryError, ValueError) as error:
            name = str(dtype).removeprefix("torch.")
            mebibytes = num_blocks * block_size * kv_bytes_per_token(config, name) >> 20
            raise CacheMemoryError(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens needs {mebibytes} MiB, "
                "more than this machine gives; lower --num-blocks or --kv-memory"
            ) from error
        self._scale = config.head_dim**-0.5

    def attention(self, slots_T: Tensor, rows: Sequence[AttentionRow]) -> StepAttention:
        """The attention of one step, whose tokens' keys and values go into `slots_T`."""
        _, _, _, num_kv_heads, block_size, _ = self.kv.shape
        slots = head_slots(slots_T, block_size=block_size, num_kv_heads=num_kv_heads)
        return StepAttention(self.kv, slots, plan_attention(rows, self.kv[0]), self._scale)

    def clear_slots(self, slots_R: Tensor) -> None:
        """Zero these slots, int64, in all layers.

        Attention reads whole blocks and masks what lies behind a sequence, but 0 x NaN is NaN: a block must not carry
        what overflowed in a sequence that had it before.
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

    def __init__(self, kv: Tensor, slots: Tensor, groups: list[AttentionGroup], scale: float) -> None:
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._scale = scale

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        kv_cache = self._kv[layer]
        kv_store(kv_cache, k_TKD, v_TKD, self._slots)
        return paged_attention(q_THD, kv_cache, self._groups, scale=self._scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: padding reads slots that nobody has written, and 0 x NaN would be NaN.

    In host memory they are numpy's, which takes pages from the system untouched: torch writes every one of them,
    which costs seconds for gigabytes that a run may never need.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    host = numpy.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=numpy.uint8)
    return torch.from_numpy(host).view(dtype)
