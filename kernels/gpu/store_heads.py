"""Storing a step's keys and values in the KV cache on a GPU, where they are not made by `qkv_store`.

Shapes: T tokens, K key-value heads, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.qkv_store import load_halves, store_halves
from eventlm.kernels.gpu.tuned import next_power_of_2


def store_heads(
    k_TKD: Tensor, v_TKD: Tensor, cache_slots_T: Tensor, kv_cache: Tensor, kv_scales: Tensor | None
) -> None:
    """Store the keys and values; any strides but the last's, which is dense.

    cache_slots_T, kv_cache, kv_scales: as `qkv_store` takes; keys and values may also be of another type than the
    cache.
    """
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    _store_heads_kernel[(num_tokens, num_kv_heads)](
        *(k_TKD, v_TKD, cache_slots_T, kv_cache, kv_scales),
        *(*k_TKD.stride()[:2], *v_TKD.stride()[:2], *kv_cache.stride()[:4]),
        *(kv_scales.stride()[:3] if kv_scales is not None else (0, 0, 0)),
        D=head_dim,
        HALF_BLOCK=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=kv_cache.shape[3],
        num_warps=1,
    )


@triton.jit
def _store_heads_kernel(
    keys,
    values,
    cache_slots,
    kv_cache,
    kv_scales,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    cache_part_stride,
    cache_block_stride,
    cache_head_stride,
    cache_place_stride,
    scales_part_stride,
    scales_block_stride,
    scales_head_stride,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    slot = tl.load(cache_slots + token)
    if slot < 0:
        return
    columns, mask = tl.arange(0, HALF_BLOCK)[None, :], heads >= 0
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cache = kv_cache + block * cache_block_stride + heads * cache_head_stride + place * cache_place_stride
    scales = None
    if kv_scales is not None:
        scales = kv_scales + block * scales_block_stride + heads * scales_head_stride + place
    first, second = load_halves(keys + token * key_stride + heads * key_head_stride, columns, mask, D)
    store_halves(cache, scales, first, second, columns, mask, D)
    if kv_scales is not None:
        scales += scales_part_stride
    first, second = load_halves(values + token * value_stride + heads * value_head_stride, columns, mask, D)
    store_halves(cache + cache_part_stride, scales, first, second, columns, mask, D)
