"""Causal attention of many new tokens a row over its paged context (FlashAttention: Dao, 2023).

A program takes a tile of queries that lie one after the other, with all the query heads that share a key-value head:
these are the M dimension of the products. Keys come in tiles that begin at multiples of their size, whatever the
queries are, and hidden keys change no bit, so what a query gets does not depend on the chunk or batch it came in.

Shapes: T tokens of the step, R rows, H query heads, K key-value heads, G = H / K, D head_dim, N tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.e4m3 import E4M3_UNIT, load_scales, unpack_e4m3
from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.soft_cap import capped_softly, soft_cap_factor
from eventlm.kernels.gpu.tuned import next_power_of_2, tuned


def tile_queries(num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> int:
    """How many queries a tile has, for `make_tiles`."""
    block_m = _config(cache_dtype, head_dim)["BLOCK_M"]
    if num_heads // num_kv_heads > block_m:
        raise ValueError(
            f"{num_heads} query heads share {num_kv_heads} key-value heads; a tile has room for {block_m} of each: "
            "give prefill_attention a larger BLOCK_M in tuned.toml"
        )
    return block_m // (num_heads // num_kv_heads)


def make_tiles(starts: Sequence[int], counts: Sequence[int], block_m: int) -> np.ndarray:
    """Cut rows of `counts` new tokens after `starts` old ones into tiles of `block_m` queries of `tile_queries`.

    Returns int32 [N, 2], (row, first query within the row), those with most to read first: the last programs to run
    are short.
    """
    counts_R = np.asarray(counts, dtype=np.int64)
    tiles_R = -(-counts_R // block_m)
    rows_N = np.repeat(np.arange(len(counts_R)), tiles_R)
    firsts_N = (np.arange(len(rows_N)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)) * block_m
    ends_N = np.asarray(starts, dtype=np.int64)[rows_N] + np.minimum(firsts_N + block_m, counts_R[rows_N])
    order_N = np.argsort(-ends_N, kind="stable")
    return np.stack((rows_N, firsts_N), axis=1)[order_N].astype(np.int32)


def prefill_attention(
    q_THD: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    slots_R: Tensor,
    starts_R: Tensor,
    query_starts_R: Tensor,
    tiles_N2: Tensor,
    *,
    scale: float,
    out_THD: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> None:
    """softmax(q k^T * scale) v of each token over those up to itself, into `out_THD`.

    q_THD, out_THD: of the model's dtype, any strides but the last's; tokens of no row stay as they are in out.
    kv_cache, kv_scales, block_tables, slots_R: as `decode_attention` takes; the step's own keys and values are there
    already. starts_R: int32, tokens before the row's first query. query_starts_R: int32 [R + 1], where in T each row's
    queries begin, and their end. tiles_N2: int32, of `make_tiles`. scale: above 0. window, soft_cap, sinks_H: as
    `decode_attention` takes. config: in place of the stored one.
    """
    _, num_heads, head_dim = q_THD.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    config = config or _config(kv_cache.dtype, head_dim)
    if kv_scales is not None:
        kv_cache = kv_cache.view(torch.int16)
    width = kv_cache.shape[-1]
    _prefill_attention[(num_kv_heads, len(tiles_N2))](
        q_THD,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        slots_R,
        starts_R,
        query_starts_R,
        tiles_N2,
        out_THD,
        sinks_H,
        scale,
        *q_THD.stride()[:2],
        *kv_cache.stride()[:2],
        *((0, 0) if kv_scales is None else kv_scales.stride()[:2]),
        block_tables.stride(0),
        *out_THD.stride()[:2],
        GROUP=num_heads // num_kv_heads,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        FP8=kv_scales is not None,
        # Tensor cores multiply rows of 16 numbers at the least.
        BLOCK_W=max(16, next_power_of_2(width)),
        **config,
    )


def _config(cache_dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    return tuned("prefill_attention", dtype=str(cache_dtype).removeprefix("torch."), head_dim=head_dim)


@triton.jit
def _prefill_attention(
    q_ptr,
    cache_ptr,
    scales_ptr,
    tables_ptr,
    slots_ptr,
    starts_ptr,
    query_starts_ptr,
    tiles_ptr,
    out_ptr,
    sinks_ptr,
    scale,
    stride_q_token,
    stride_q_head,
    stride_values,
    stride_block,
    stride_value_scales,
    stride_block_scales,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile and key-value head. WIDTH: D, of fp8 D / 2, the pairs that `e4m3` is about."""
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    HEAD_DIM: tl.constexpr = WIDTH * 2 if FP8 else WIDTH
    BLOCK_D: tl.constexpr = BLOCK_W * 2 if FP8 else BLOCK_W
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    row = tl.load(tiles_ptr + 2 * tile)
    first_query = tl.load(tiles_ptr + 2 * tile + 1)
    start = tl.load(starts_ptr + row)
    query_start = tl.load(query_starts_ptr + row)
    last_query = tl.minimum(first_query + QUERIES, tl.load(query_starts_ptr + row + 1) - query_start)

    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = first_query + offs_m // GROUP
    is_query = (queries < last_query) & (offs_m < QUERIES * GROUP)
    tokens = (query_start + queries).to(tl.int64)
    heads = kv_head * GROUP + offs_m % GROUP
    q_ptrs = q_ptr + (tokens * stride_q_token + heads * stride_q_head)[:, None]
    q = tl.load(q_ptrs + offs_d, mask=is_query[:, None] & (offs_d < HEAD_DIM), other=0.0)
    factor = tl.full([BLOCK_M], scale * 1.4426950408889634, tl.float32)
    if FP8:
        # Queries of any size fit into float16 so.
        q = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
        q, q_odd = tl.split(tl.reshape((q / largest[:, None]).to(tl.float16), [BLOCK_M, BLOCK_W, 2]))
        factor *= largest * E4M3_UNIT
    else:
        if UPCAST:
            q = q.to(tl.float32)
        q_odd = q
    # What a score is multiplied by before its cap.
    inner_factor = factor
    if SOFT_CAP != 0.0:
        inner_factor = factor * soft_cap_factor(SOFT_CAP)
        factor = tl.full([BLOCK_M], 1.0, tl.float32)

    keys = cache_ptr + kv_head * BLOCK_SIZE * WIDTH
    values = keys + stride_values.to(tl.int64)
    key_scales = scales_ptr + kv_head * BLOCK_SIZE
    value_scales = key_scales + stride_value_scales
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    # Of a window's first tiles a query may see nothing, and the difference of infinities would be no number.
    highest = tl.full([BLOCK_M], -1e30 if WINDOW else float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        highest = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634 / factor
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    positions = start + queries
    end = start + last_query
    # Up to the position of the first query all queries see all keys.
    all_seen = (start + first_query + 1) // BLOCK_N * BLOCK_N
    first_key = tl.maximum(start + first_query + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    for masked in tl.static_range(2):
        acc, acc_odd, highest, total = _attend(
            acc,
            acc_odd,
            highest,
            total,
            q,
            q_odd,
            inner_factor,
            factor,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            stride_block,
            stride_block_scales,
            positions,
            all_seen if masked else first_key,
            end if masked else all_seen,
            MASKED=masked,
            WIDTH=WIDTH,
            BLOCK_SIZE=BLOCK_SIZE,
            WINDOW=WINDOW,
            SOFT_CAP=SOFT_CAP,
            FP8=FP8,
            BLOCK_W=BLOCK_W,
            BLOCK_N=BLOCK_N,
        )

    if FP8:
        acc = tl.interleave(acc, acc_odd) * E4M3_UNIT
    out_ptrs = out_ptr + (tokens * stride_out_token + heads * stride_out_head)[:, None] + offs_d
    is_out = is_query[:, None] & (offs_d < HEAD_DIM)
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _attend(
    acc,
    acc_odd,
    highest,
    total,
    q,
    q_odd,
    inner_factor,
    factor,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    stride_block,
    stride_block_scales,
    positions,
    begin,
    end,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys from `begin` to `end`; MASKED: not all queries see all of them.

    `highest` is of the scores before `factor`, and after their cap. With a mask or without, the same is computed with
    what is seen, to the last bit: hence the multiplication and addition in one.
    """
    offs_n, offs_w = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    for first in range(begin, end, BLOCK_N):
        tokens = first + offs_n
        places = tokens % BLOCK_SIZE
        is_token = tokens < end
        if MASKED or BLOCK_W > WIDTH:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
            offsets = (blocks * stride_block + places * WIDTH)[:, None] + offs_w
            # Not only are tokens past the end hidden: what lies there may be no number at all.
            is_loaded = is_token[:, None] & (offs_w < WIDTH)
            k = tl.load(keys + offsets, mask=is_loaded, other=0)
            v = tl.load(values + offsets, mask=is_loaded, other=0)
        else:
            # All of the tile is there, and no load waits for a mask.
            blocks = tl.load(table + tokens // BLOCK_SIZE).to(tl.int64)
            offsets = (blocks * stride_block + places * WIDTH)[:, None] + offs_w
            k = tl.load(keys + offsets)
            v = tl.load(values + offsets)
        if FP8:
            scale_offsets = blocks * stride_block_scales + places
            k_scales = load_scales(key_scales + scale_offsets, is_token)
            v_scales = load_scales(value_scales + scale_offsets, is_token)
            k_even, k_odd = unpack_e4m3(k)
            scores = tl.dot(q_odd, k_odd.T, tl.dot(q, k_even.T)) * k_scales
        else:
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q, k.T, input_precision="ieee")
        if SOFT_CAP != 0.0:
            scores = capped_softly(scores * inner_factor[:, None], SOFT_CAP)
        if WINDOW:
            scores = tl.where(tokens > positions[:, None] - WINDOW, scores, float("-inf"))
        if MASKED:
            scores = tl.where(tokens <= positions[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2((highest - new_highest) * factor)
        weights = tl.exp2(tl.fma(scores, factor[:, None], -(new_highest * factor)[:, None]))
        total = total * decay + tl.sum(weights, 1)
        highest = new_highest
        if FP8:
            # bfloat16 has room for any scale; to take the tile's largest out of it, others' tokens would count.
            weights = (weights * v_scales).to(tl.bfloat16)
            v_even, v_odd = unpack_e4m3(v)
            v_even, v_odd = v_even.to(tl.bfloat16), v_odd.to(tl.bfloat16)
            if UPCAST:
                weights, v_even, v_odd = weights.to(tl.float32), v_even.to(tl.float32), v_odd.to(tl.float32)
            acc = tl.dot(weights, v_even, acc * decay[:, None])
            acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, acc_odd, highest, total
