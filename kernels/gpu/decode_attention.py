"""Attention of one new token a row over its paged context (flash-decoding: Dao et al., 2023).

A program reads one key-value head of one split of a row's context, once, for all the query heads that share it: they
are the M dimension of the products, padded to the 16 that tensor cores have. A row's splits are merged afterwards, so
that one long sequence fills the GPU, too.

Shapes: R rows, H query heads, K key-value heads, G = H / K, S splits, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.e4m3 import E4M3_UNIT, load_scales, unpack_e4m3
from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.merge_attention import merge_attention
from eventlm.kernels.gpu.soft_cap import capped_softly, soft_cap_factor
from eventlm.kernels.gpu.tuned import next_power_of_2, tuned

MAX_SPLITS = 64
#: No split is shorter, or starting it costs more than it saves.
_MIN_SPLIT = 64
#: How many programs a processor runs at a time; bounded by its shared memory.
_PROGRAMS_PER_PROCESSOR = 2
_WAVES = 2


class SplitParts(NamedTuple):
    """Where the splits of a step go, the same for all layers: float32 [R, H, S, D] and [R, H, S]."""

    partial: Tensor
    lse: Tensor


class SplitScratch:
    """Room for the splits of steps, one at a time. num_parts: rows times splits of the step that has most of them."""

    def __init__(self, num_parts: int, num_heads: int, head_dim: int, device: torch.device | str) -> None:
        self._num_heads, self._head_dim = num_heads, head_dim
        self._partial = torch.empty(num_parts * num_heads * head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(num_parts * num_heads, dtype=torch.float32, device=device)

    def of_step(self, num_rows: int, num_splits: int) -> SplitParts | None:
        """For `num_rows` rows in `num_splits` each; None if that is 1, which needs no room."""
        if num_splits == 1:
            return None
        shape = (num_rows, self._num_heads, num_splits)
        num_parts = math.prod(shape)
        partial = self._partial[: num_parts * self._head_dim].view(*shape, self._head_dim)
        return SplitParts(partial, self._lse[:num_parts].view(shape))


def num_splits(num_rows: int, num_kv_heads: int, num_processors: int, max_context: int) -> int:
    """Into how many parts to split each context, a power of two from 1 to 64.

    As many as make two waves of programs, but none shorter than 64 tokens of `max_context`, the longest context there
    is. Of host integers alone: the grid of a captured graph is fixed.
    """
    wanted = _WAVES * _PROGRAMS_PER_PROCESSOR * num_processors
    splits = 1
    while splits < MAX_SPLITS and num_rows * num_kv_heads * splits < wanted and 2 * splits * _MIN_SPLIT <= max_context:
        splits *= 2
    return splits


def decode_attention(
    q_RHD: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    slots_R: Tensor,
    lengths_R: Tensor,
    order_R: Tensor,
    *,
    scale: float,
    num_splits: int,
    parts: SplitParts | None,
    out_RHD: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> None:
    """softmax(q k^T * scale) v of each row's token over its context, into `out_RHD`.

    q_RHD, out_RHD: of the model's dtype, any strides but the last's. kv_cache: one layer's
    [2, num_blocks, K, block_size, D], keys first, of any floating type; fp8 with kv_scales float32
    [2, num_blocks, K, block_size], which elements are multiplied by, else None. block_tables: int32
    [num_slots, max_blocks]. slots_R: int32, the row's in block_tables. lengths_R: int32, tokens of context, the row's
    own included; 0 for rows of padding, which become zeros. order_R: int32, all rows as
    programs take them: with the longest first none runs on alone in the end; no result depends on it. parts: of a
    `SplitScratch`, for num_splits > 1. window: how many tokens a query sees, itself among them; 0: all. soft_cap:
    scores become soft_cap * tanh(score / soft_cap); 0: they stay. sinks_H: any floating type, scores that take part in
    the softmax and have no value. config: in place of the stored one.
    """
    num_rows, num_heads, head_dim = q_RHD.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    is_split = num_splits > 1
    if is_split and parts is None:
        raise ValueError(f"decode_attention: parts is None with {num_splits} splits: pass SplitScratch.of_step()")
    partial, lse = parts if is_split and parts is not None else (out_RHD, lengths_R)
    config = config or tuned("decode_attention", dtype=str(kv_cache.dtype).removeprefix("torch."), head_dim=head_dim)
    if kv_scales is not None:
        kv_cache = kv_cache.view(torch.int16)
    width = kv_cache.shape[-1]
    group = num_heads // num_kv_heads
    _decode_attention[(num_kv_heads, num_splits, num_rows)](
        q_RHD,
        kv_cache,
        kv_cache if kv_scales is None else kv_scales,
        block_tables,
        slots_R,
        lengths_R,
        order_R,
        out_RHD,
        partial,
        lse,
        sinks_H,
        scale,
        *q_RHD.stride()[:2],
        *kv_cache.stride()[:2],
        *((0, 0) if kv_scales is None else kv_scales.stride()[:2]),
        block_tables.stride(0),
        *out_RHD.stride()[:2],
        *((0, 0) if not is_split else partial.stride()[:2]),
        0 if not is_split else lse.stride(0),
        GROUP=group,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        FP8=kv_scales is not None,
        BLOCK_G=max(16, next_power_of_2(group)),
        # Tensor cores multiply rows of 16 numbers at the least.
        BLOCK_W=max(16, next_power_of_2(width)),
        **config,
    )
    if is_split:
        merge_attention(partial, lse, out_RHD)


@triton.jit
def _decode_attention(
    q_ptr,
    cache_ptr,
    scales_ptr,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    order_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    scale,
    stride_q_row,
    stride_q_head,
    stride_values,
    stride_block,
    stride_value_scales,
    stride_block_scales,
    stride_table,
    stride_out_row,
    stride_out_head,
    stride_partial_row,
    stride_partial_head,
    stride_lse_row,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One split of one row and key-value head. WIDTH: D, of fp8 D / 2, the pairs that `e4m3` is about."""
    kv_head, split = tl.program_id(0), tl.program_id(1)
    row = tl.load(order_ptr + tl.program_id(2)).to(tl.int64)
    HEAD_DIM: tl.constexpr = WIDTH * 2 if FP8 else WIDTH
    BLOCK_D: tl.constexpr = BLOCK_W * 2 if FP8 else BLOCK_W
    offs_g, offs_n, offs_w, offs_d = (
        tl.arange(0, BLOCK_G),
        tl.arange(0, BLOCK_N),
        tl.arange(0, BLOCK_W),
        tl.arange(0, BLOCK_D),
    )
    heads = kv_head * GROUP + offs_g
    is_head = offs_g < GROUP
    is_out = is_head[:, None] & (offs_d < HEAD_DIM)
    length = tl.load(lengths_ptr + row)
    # What is split is what the query sees, in whole tiles.
    first_seen = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first_tile = first_seen // BLOCK_N * BLOCK_N
    split_length = tl.cdiv(tl.cdiv(length - first_tile, NUM_SPLITS), BLOCK_N) * BLOCK_N
    start = first_tile + split * split_length
    end = tl.minimum(start + split_length, length)
    if NUM_SPLITS == 1:
        out_ptrs = out_ptr + row * stride_out_row + heads[:, None] * stride_out_head + offs_d
        if length == 0:
            tl.store(out_ptrs, tl.zeros([BLOCK_G, BLOCK_D], out_ptr.dtype.element_ty), mask=is_out)
            return
    else:
        out_ptrs = (
            partial_ptr + row * stride_partial_row + heads[:, None] * stride_partial_head + split * HEAD_DIM + offs_d
        )
        lse_ptrs = lse_ptr + row * stride_lse_row + heads * NUM_SPLITS + split
        if start >= end:
            tl.store(lse_ptrs, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=is_head)
            return

    q_ptrs = q_ptr + row * stride_q_row + heads[:, None] * stride_q_head
    q = tl.load(q_ptrs + offs_d, mask=is_out, other=0.0)
    factor = tl.full([BLOCK_G], scale * 1.4426950408889634, tl.float32)
    if FP8:
        # Queries of any size fit into float16 so.
        q = q.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
        q, q_odd = tl.split(tl.reshape((q / largest[:, None]).to(tl.float16), [BLOCK_G, BLOCK_W, 2]))
        factor *= largest * E4M3_UNIT
    elif UPCAST:
        q = q.to(tl.float32)
    if SOFT_CAP != 0.0:
        factor *= soft_cap_factor(SOFT_CAP)

    keys = cache_ptr + kv_head * BLOCK_SIZE * WIDTH
    values = keys + stride_values.to(tl.int64)
    key_scales = scales_ptr + kv_head * BLOCK_SIZE
    value_scales = key_scales + stride_value_scales
    table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if sinks_ptr is not None:
        # One split counts them.
        sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        highest = tl.where(split == 0, sinks, highest)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_G, BLOCK_W], tl.float32)
    for first in range(start, end, BLOCK_N):
        tokens = first + offs_n
        is_token = tokens < end
        if WINDOW:
            is_token &= tokens >= first_seen
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        places = tokens % BLOCK_SIZE
        offsets = (blocks * stride_block + places * WIDTH)[:, None] + offs_w
        # Not only are tokens past the end hidden: what lies there may be no number at all.
        is_loaded = is_token[:, None] & (offs_w < WIDTH)
        k = tl.load(keys + offsets, mask=is_loaded, other=0)
        v = tl.load(values + offsets, mask=is_loaded, other=0)
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
        scores *= factor[:, None]
        if SOFT_CAP != 0.0:
            scores = capped_softly(scores, SOFT_CAP)
        scores = tl.where(is_token, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * decay + tl.sum(weights, 1)
        highest = new_highest
        if FP8:
            # Of the tile's largest scale, so that the weights fit into float16, too.
            largest_scale = tl.maximum(tl.max(v_scales, 0), 1e-30)
            weights = (weights * (v_scales / largest_scale)).to(tl.float16)
            v_even, v_odd = unpack_e4m3(v)
            acc = acc * decay[:, None] + tl.dot(weights, v_even) * (largest_scale * E4M3_UNIT)
            acc_odd = acc_odd * decay[:, None] + tl.dot(weights, v_odd) * (largest_scale * E4M3_UNIT)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

    if FP8:
        acc = tl.interleave(acc, acc_odd)
    tl.store(out_ptrs, (acc / total[:, None]).to(out_ptrs.dtype.element_ty), mask=is_out)
    if NUM_SPLITS > 1:
        tl.store(lse_ptrs, (highest + tl.log2(total)) * 0.6931471805599453, mask=is_head)
