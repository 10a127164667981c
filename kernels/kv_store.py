"""Writing a step's keys and values into their cache slots.

Shapes: T tokens of the step, K key-value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eventlm.kernels.kv_quantization import is_quantized, quantize


def head_slots(slots_T: Tensor, *, block_size: int, num_kv_heads: int) -> Tensor:
    """Where each token's heads lie in a cache seen as [num_blocks * K * block_size, D], int64 [T * K].

    slots_T: block number x block_size + position in the block, int64. Once a step, for all layers.
    """
    blocks_T, places_T = slots_T // block_size, slots_T % block_size
    heads = torch.arange(num_kv_heads, device=slots_T.device)
    return ((blocks_T[:, None] * num_kv_heads + heads) * block_size + places_T[:, None]).flatten()


def kv_store(kv_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, head_slots: Tensor) -> None:
    """Store each token's key and value, by the slots that the function `head_slots` gives.

    kv_cache: one layer's [2, num_blocks, K, block_size, D], keys first, of any floating type, or quantized.
    """
    for cache, new_TKD in zip(kv_cache.flatten(1, 3), (k_TKD, v_TKD), strict=True):
        new = new_TKD.flatten(0, 1)
        cache.index_copy_(0, head_slots, quantize(new, cache.dtype) if is_quantized(cache) else new.to(cache.dtype))
