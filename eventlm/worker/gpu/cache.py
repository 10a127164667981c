"""The keys and values of all sequences on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from eventlm.kernels.kv_store import head_slots
from eventlm.models.spec import ModelSpec
from eventlm.worker.cache_engine import CacheMemoryError


class GpuCache:
    """The tensor `kv` [layers, 2, num_blocks, kv_heads, block_size, head_dim], keys first.

    For `kv_dtype` fp8 its elements are to be multiplied by `scales` [layers, 2, num_blocks, kv_heads, block_size],
    which is None for others. `dtype` is that of the model. It has no blocks before `resize`.
    """

    def __init__(
        self, config: ModelSpec, *, block_size: int, dtype: torch.dtype, kv_dtype: str, device: torch.device
    ) -> None:
        self._config, self._block_size = config, block_size
        self._dtype, self._is_fp8, self._device = dtype, kv_dtype == "fp8", device
        self.kv: Tensor
        self.scales: Tensor | None
        self.resize(0)

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks, all of zeros; the memory of those before is given back first.

        Raises CacheMemoryError where there is too little.
        """
        self.kv, self.scales = torch.empty(0), None
        config = self._config
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, self._block_size)
        dtype = torch.uint8 if self._is_fp8 else self._dtype
        try:
            # Zeros: whole blocks are read, and what is after a sequence's end must be finite.
            stored = torch.zeros(*shape, config.head_dim, dtype=dtype, device=self._device)
            scales = torch.zeros(shape, dtype=torch.float32, device=self._device) if self._is_fp8 else None
        except torch.OutOfMemoryError as error:
            raise CacheMemoryError(
                f"a KV cache of {num_blocks} blocks of {self._block_size} tokens does not fit into the GPU's free "
                f"memory ({str(error).splitlines()[0]}); lower --num-blocks, --kv-memory or --gpu-memory-utilization, "
                "or end other programs on it"
            ) from error
        self.kv, self.scales = stored.view(torch.float8_e4m3fn) if self._is_fp8 else stored, scales

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

    def clear_slots(self, slots_R: Tensor) -> None:
        """Zero these slots, int64, in all layers of a cache that is not fp8; see `CacheEngine.clear_slots`."""
        if slots_R.numel():
            slots = head_slots(slots_R, block_size=self._block_size, num_kv_heads=self._config.num_kv_heads)
            self.kv.flatten(2, 4).flatten(0, 1).index_fill_(1, slots.to(self._device), 0)

    def clear(self, num_blocks: int) -> None:
        """Zero the first `num_blocks` blocks."""
        self.kv.view(torch.uint8)[:, :, :num_blocks].zero_()
