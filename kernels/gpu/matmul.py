"""A matrix product on a GPU that is invariant to the batch: a row's result has the same bits in any batch.

Libraries choose tiles, and whether to split K, by the number of rows, and so the order in which products are added up.
Here one program reduces K for its tile, in one order, with a configuration that the weight's shape alone decides: see
He and others, "Defeating Nondeterminism in LLM Inference" (2025). Programs take tiles in turn, in an order in which
those at work at a time share rows of x and of the weight (grouped as in Triton's tutorial of matrix products).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.tuned import ceil_div, tuned

#: Processors of the interpreter: so few that tests see programs that do several pieces.
_INTERPRETED = 3


def matmul(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    out_TN: Tensor | None = None,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """`x @ weight.T + bias` [T, N], into `out_TN` if given; sums are taken in float32 and rounded once.

    All are of one dtype: float32 (without TF32), bfloat16 or float16. Rows may lie apart; the last dimension must be
    dense. With `config`, results are comparable only with those of the same.
    """
    T, K = x_TK.shape
    N = weight_NK.shape[0]
    out = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device) if out_TN is None else out_TN
    if config is None:
        # Of the weight alone: with T, another batch would be reduced in another order.
        config = tuned("matmul", dtype=str(x_TK.dtype).removeprefix("torch."), N=N, K=K)
    launch = dict(config)
    programs = num_processors(x_TK.device) * launch.pop("programs")
    tiles = ceil_div(T, config["BLOCK_M"]) * ceil_div(N, config["BLOCK_N"])
    if tiles:
        _matmul_kernel[(min(tiles, programs),)](
            x_TK, weight_NK, bias_N, out, T, N, K, x_TK.stride(0), weight_NK.stride(0), out.stride(0), **launch
        )
    return out


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, each of which runs programs that take tiles in turn."""
    if device.type != "cuda":
        return _INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


# Code specialised by T would be other code in another batch.
@triton.jit(do_not_specialize=["T"])
def _matmul_kernel(
    x,
    weight,
    bias,
    out,
    T,
    N,
    K,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first_m = tile // (GROUP_M * tiles_n) * GROUP_M
        size = tl.minimum(tiles_m - first_m, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        rows = (first_m + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
        # What is past the end is read from the last row, and not written.
        x_rows = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * x_stride
        weight_rows = weight + tl.minimum(columns, N - 1).to(tl.int64)[None, :] * weight_stride
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            places = start + tl.arange(0, BLOCK_K)
            a = tl.load(x_rows + places[None, :], mask=(places < K)[None, :], other=0.0)
            b = tl.load(weight_rows + places[:, None], mask=(places < K)[:, None], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            sums = tl.dot(a, b, sums, input_precision="ieee")
        if bias is not None:
            sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :],
            sums.to(out.dtype.element_ty),
            mask=(rows < T)[:, None] & (columns < N)[None, :],
        )
