"""Writing a step's keys and values into their cache slots."""

from __future__ import annotations

from torch import Tensor


def kv_store(kv_cache: Tensor, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor) -> None:
    """Store each token's key and value in its slot.

    kv_cache: one layer's cache [2, num_blocks, block_size, kv_heads, head_dim], keys first. k_THD, v_THD:
    [tokens, kv_heads, head_dim]. slots_T: [tokens] int64, block number x block_size + place in the block.
    """
    keys, values = kv_cache.flatten(1, 2)
    keys.index_copy_(0, slots_T, k_THD)
    values.index_copy_(0, slots_T, v_THD)
