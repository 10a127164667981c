"""The keys and values of all sequences on a GPU, and the tables that say where each sequence's are."""

from __future__ import annotations

import torch
from torch import Tensor

from eventlm.models.config import DecoderConfig


class GpuCache:
    """The tensor `kv` [layers, 2, num_blocks, kv_heads, block_size, head_dim], keys first.

    For `kv_dtype` fp8 its elements are to be multiplied by `scales` [layers, 2, num_blocks, kv_heads, block_size],
    which is None for others. `dtype` is that of the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size)
        is_fp8 = kv_dtype == "fp8"
        # Zeros, for a block is read whole, and what lies behind a sequence's end must be finite.
        stored = torch.zeros(*shape, config.head_dim, dtype=torch.uint8 if is_fp8 else dtype, device=device)
        self.kv = stored.view(torch.float8_e4m3fn) if is_fp8 else stored
        self.scales = torch.zeros(shape, dtype=torch.float32, device=device) if is_fp8 else None

    @property
    def num_blocks(self) -> int:
        """Of each layer."""
        return self.kv.shape[2]

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take in all layers."""
        _, _, num_blocks, _, block_size, _ = self.kv.shape
        scale_bytes = self.scales.nbytes if self.scales is not None else 0
        return (self.kv.nbytes + scale_bytes) // (num_blocks * block_size)

    def layer(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Elements and scales of one layer."""
        return self.kv[number], self.scales[number] if self.scales is not None else None

    def clear(self, num_blocks: int) -> None:
        """Zero the first `num_blocks` blocks."""
        self.kv.view(torch.uint8)[:, :, :num_blocks].zero_()
