"""The matrix products of experts (mixture of experts; Shazeer and others, 2017) on a GPU, all in one launch.

Which rows are an expert's is known on the device alone, so the grid has as many tiles as there can be at the most, and
each program finds its expert from the offsets; programs past the last tile end at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.tuned import ceil_div, next_power_of_2, tuned


def grouped_gemm(
    x_TK: Tensor,
    weight_ENK: Tensor,
    offsets_E1: Tensor,
    *,
    max_rows: int,
    out_TN: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """Each expert's rows times its matrix, `x[offsets[e] : offsets[e + 1]] @ weight[e].T`: [T, N], rounded once.

    x_TK has the rows sorted by expert; offsets_E1 is int32 on the device, ascending; an expert may have no row. Rows
    before the first offset or from the last one on are not written. `max_rows` is the most rows that an expert can
    have, which with top-k routing is the number of tokens. x, weight and out are of one dtype: bfloat16, float16 or
    float32 (without TF32); sums are taken in float32. Rows and experts may lie apart; the last dimension must be dense.
    The stored configuration depends on how many rows an expert has on average; with one `config` for all batches, a
    row's result has the same bits in any of them.
    """
    T, K = x_TK.shape
    E, N, _ = weight_ENK.shape
    out = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device) if out_TN is None else out_TN
    if config is None:
        dtype = str(x_TK.dtype).removeprefix("torch.")
        config = tuned("grouped_gemm", dtype=dtype, rows=ceil_div(T, E), N=N, K=K)
    tiles_m = most_tiles(T, E, max_rows, config["BLOCK_M"])
    if tiles_m:
        _grouped_gemm_kernel[(tiles_m * ceil_div(N, config["BLOCK_N"]),)](
            x_TK,
            weight_ENK,
            offsets_E1,
            out,
            tiles_m,
            N,
            K,
            x_TK.stride(0),
            weight_ENK.stride(0),
            weight_ENK.stride(1),
            out.stride(0),
            E=E,
            EXPERTS=next_power_of_2(E),
            **config,
        )
    return out


def most_tiles(T: int, E: int, max_rows: int, block: int) -> int:
    """How many tiles of `block` rows E experts can have together: all but one of an expert's are full."""
    return min(T // block + min(E, T), E * -(-max_rows // block))


# Numbers of tokens differ from step to step: one code for all.
@triton.jit(do_not_specialize=["tiles_m"])
def _grouped_gemm_kernel(
    x,
    weight,
    offsets,
    out,
    tiles_m,
    N,
    K,
    x_stride,
    expert_stride,
    weight_stride,
    out_stride,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    size = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    tile_m = first_m + within % size
    tile_n = within // size

    expert, before = expert_of_tile(offsets, tile_m, E, EXPERTS, BLOCK_M)
    if expert >= E:
        return
    end = tl.load(offsets + expert + 1)
    rows = tl.load(offsets + expert) + (tile_m - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)

    # What is past the end is read from the last row, and not written.
    x_rows = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride
    weight_rows = weight + expert.to(tl.int64) * expert_stride
    weight_rows += tl.minimum(columns, N - 1).to(tl.int64)[None, :] * weight_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        places = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_rows + places[None, :], mask=(places < K)[None, :], other=0.0)
        b = tl.load(weight_rows + places[:, None], mask=(places < K)[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < N)[None, :],
    )


@triton.jit
def expert_of_tile(offsets, tile, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile of BLOCK_M rows, E past the last tile, and how many tiles there are before the expert's."""
    experts = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + experts, mask=experts < E, other=0)
    ends = tl.load(offsets + experts + 1, mask=experts < E, other=0)
    tiles_E = tl.cdiv(ends - starts, BLOCK_M)
    # Tiles of the experts up to this one, itself included.
    last_tiles = tl.cumsum(tiles_E)
    expert = tl.sum((last_tiles <= tile).to(tl.int32))
    return expert, tl.sum(tl.where(experts < expert, tiles_E, 0))
