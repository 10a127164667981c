"""What lies between the projection of query, key and value and attention, in one pass over them on a GPU.

Queries and keys are normalized (where the model has such norms, as Qwen3) and rotated; queries stay where they are,
keys and values go into the KV cache. Computed in float32 and rounded where transformers rounds: normalized numbers,
their products with the weight, the two products of a rotation, and their sum.

Shapes: T tokens, H query heads, K key-value heads, N = (H + 2 * K) * D, D head_dim, P positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import ceil_div, next_power_of_2, tuned


def qkv_store(
    qkv_TN: Tensor,
    positions_T: Tensor,
    cache_slots_T: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    num_heads: int,
) -> None:
    """Normalize and rotate the queries of `qkv_TN` in place, and store its keys and values; the rest of it stays.

    qkv_TN: a row has the heads of the query, then the key's, then the value's. positions_T: int32, rows of the tables
    `cos_PD2` and `sin_PD2` [P, D / 2], dense and of qkv's dtype. cache_slots_T: int64, block x block_size + place;
    -1: padding, of which nothing is read or written. kv_cache: one layer's [2, num_blocks, K, block_size, D], keys
    first, of qkv's dtype or float8_e4m3fn; kv_scales: for that [2, num_blocks, K, block_size] float32, which elements
    are to be multiplied by (the head's largest magnitude over 448), else None. Of all the last dimension is dense.
    """
    head_dim, (_, _, num_kv_heads, block_size, _) = 2 * cos_PD2.shape[1], kv_cache.shape
    config = tuned("qkv_store", head_dim=head_dim)
    # A program takes this many heads of a token, or of its keys and its values.
    q_block = min(config["HEADS"], next_power_of_2(num_heads))
    kv_block = min(config["HEADS"], next_power_of_2(num_kv_heads))
    q_groups = ceil_div(num_heads, q_block)
    _qkv_store_kernel[(len(qkv_TN), q_groups + ceil_div(num_kv_heads, kv_block))](
        *(qkv_TN, positions_T, cache_slots_T, cos_PD2, sin_PD2, q_weight_D, k_weight_D, eps, kv_cache, kv_scales),
        *(qkv_TN.stride(0), *kv_cache.stride()[:4], *(kv_scales.stride()[:3] if kv_scales is not None else (0, 0, 0))),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        HALF_BLOCK=next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        Q_BLOCK=q_block,
        Q_GROUPS=q_groups,
        KV_BLOCK=kv_block,
        num_warps=config["num_warps"],
        # A product and a sum in one would leave out the rounding between them.
        enable_fp_fusion=False,
    )


@triton.jit
def _qkv_store_kernel(
    qkv,
    positions,
    cache_slots,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    kv_cache,
    kv_scales,
    qkv_stride,
    cache_part_stride,
    cache_block_stride,
    cache_head_stride,
    cache_place_stride,
    scales_part_stride,
    scales_block_stride,
    scales_head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    KV_BLOCK: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(cache_slots + token)
    if slot < 0:
        return
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    angles = tl.load(positions + token).to(tl.int64) * (D // 2) + columns
    token_cos = tl.load(cos + angles, mask=columns < D // 2, other=0.0).to(tl.float32)
    token_sin = tl.load(sin + angles, mask=columns < D // 2, other=0.0).to(tl.float32)
    row = qkv + token * qkv_stride
    if group < Q_GROUPS:
        q_heads = group * Q_BLOCK + tl.arange(0, Q_BLOCK)
        _turn_queries(row, q_heads, q_weight, eps, token_cos, token_sin, columns, H, D)
    else:
        kv_heads = ((group - Q_GROUPS) * KV_BLOCK + tl.arange(0, KV_BLOCK)).to(tl.int64)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        cache = kv_cache + block * cache_block_stride + kv_heads * cache_head_stride + place * cache_place_stride
        scales = None
        if kv_scales is not None:
            scales = kv_scales + block * scales_block_stride + kv_heads * scales_head_stride + place
        first, second = load_halves(row + (H + kv_heads) * D, columns, kv_heads < K, D)
        first_value, second_value = load_halves(row + (H + K + kv_heads) * D, columns, kv_heads < K, D)
        DTYPE: tl.constexpr = qkv.dtype.element_ty
        first, second = _turned(first, second, k_weight, eps, token_cos, token_sin, columns, D, DTYPE)
        store_halves(cache, scales, first, second, columns, kv_heads < K, D)
        cache += cache_part_stride
        if kv_scales is not None:
            scales += scales_part_stride
        store_halves(cache, scales, first_value, second_value, columns, kv_heads < K, D)


@triton.jit
def _turn_queries(row, heads, weight, eps, cos, sin, columns, H: tl.constexpr, D: tl.constexpr):
    first, second = load_halves(row + heads * D, columns, heads < H, D)
    first, second = _turned(first, second, weight, eps, cos, sin, columns, D, row.dtype.element_ty)
    store_halves(row + heads * D, None, first, second, columns, heads < H, D)


@triton.jit
def load_halves(heads, columns, head_mask, D: tl.constexpr):
    """Both halves of heads in float32, from pointers to their beginnings; 0 where the mask is."""
    mask = head_mask[:, None] & (columns < D // 2)
    pointers = heads[:, None] + columns
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + D // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_halves(heads, scales, first, second, columns, head_mask, D: tl.constexpr):
    """Both halves of heads to pointers to their beginnings; as fp8 with `scales`, unless these are None."""
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        # Smaller ones become zeros: the inverse of their scale might be infinite.
        inverse = tl.where(largest > 1e-30, tl.div_rn(1.0, largest) * 448.0, 0.0)[:, None]
        tl.store(scales, tl.div_rn(largest, 448.0), mask=head_mask)
        first, second = first * inverse, second * inverse
    mask = head_mask[:, None] & (columns < D // 2)
    pointers = heads[:, None] + columns
    tl.store(pointers, first.to(heads.dtype.element_ty), mask=mask)
    tl.store(pointers + D // 2, second.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _turned(first, second, weight, eps, cos, sin, columns, D: tl.constexpr, DTYPE: tl.constexpr):
    """Both halves of heads behind norm (without, if `weight` is None) and rotation, in float32, rounded to DTYPE."""
    if weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        mask = columns < D // 2
        first_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + D // 2 + columns, mask=mask, other=0.0).to(tl.float32)
        first = _rounded(_rounded(first * inverse, DTYPE) * first_weight, DTYPE)
        second = _rounded(_rounded(second * inverse, DTYPE) * second_weight, DTYPE)
    turned_first = _rounded(first * cos, DTYPE) - _rounded(second * sin, DTYPE)
    turned_second = _rounded(second * cos, DTYPE) + _rounded(first * sin, DTYPE)
    return _rounded(turned_first, DTYPE), _rounded(turned_second, DTYPE)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr):
    return values.to(DTYPE).to(tl.float32)
