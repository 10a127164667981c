"""A product with a matrix of codes of 4 or 8 bits on a GPU, which stays packed in its memory.

Codes become numbers of the type of x in registers, tile by tile, and are multiplied by the tensor cores. A row's result
does not depend on the others if the configuration does not, which `is_invariant` sees to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.kernels.gpu.tuned import ceil_div, tuned


def packed_matmul(
    x_TK: Tensor,
    matrix: PackedWeight,
    bias_N: Tensor | None = None,
    *,
    is_invariant: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """`x @ matrix.T + bias` [T, N]; sums are taken in float32 and rounded once.

    x and bias are of one dtype: bfloat16, float16 or float32 (without TF32), to which the matrix's numbers are rounded.
    Rows of x may lie apart; the last dimension must be dense. is_invariant: one configuration for any number of rows.
    """
    T, N = len(x_TK), matrix.num_out
    out = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device)
    if config is None:
        config = tuned("packed_matmul", **({} if is_invariant else {"rows": T}))
    if T:
        _packed_matmul_kernel[(ceil_div(N, config["BLOCK_N"]), ceil_div(T, config["BLOCK_M"]))](
            *(x_TK, matrix.codes, matrix.scales, matrix.shifts, bias_N, out),
            *(T, N, x_TK.stride(0), matrix.codes.stride(0), matrix.scales.stride(0), out.stride(0)),
            K=matrix.num_in,
            BITS=matrix.bits,
            GROUP=matrix.group,
            IS_ADDED=matrix.is_added,
            **config,
        )
    return out


# Code specialised by T would be other code in another batch.
@triton.jit(do_not_specialize=["T"])
def _packed_matmul_kernel(
    x,
    codes,
    scales,
    shifts,
    bias,
    out,
    T,
    N,
    x_stride,
    codes_stride,
    groups_stride,
    out_stride,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each step of the loop takes a unit of 64 inputs, in two halves, which lie in one group each."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, 32)
    # What is past the end is read from the last row, and not written.
    x_rows = x + tl.minimum(rows, T - 1).to(tl.int64)[:, None] * x_stride
    outputs = tl.minimum(columns, N - 1).to(tl.int64)
    code_rows = codes + outputs[None, :] * codes_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, 64):
        if BITS == 4:
            pairs = tl.load(code_rows + (start // 2 + inputs)[:, None])
        for half in tl.static_range(2):
            places = start + half * 32 + inputs
            # The second half of the last unit may not be there.
            is_input = places < K
            is_half = start + half * 32 < K
            if BITS == 4:
                numbers = ((pairs >> (4 * half)) & 15).to(tl.float32)
            else:
                numbers = tl.load(code_rows + places[:, None], mask=is_input[:, None], other=0).to(tl.float32)
            group = outputs * groups_stride + (start + half * 32) // GROUP
            scale = tl.load(scales + group, mask=(columns >= 0) & is_half, other=0.0).to(tl.float32)
            if shifts is None:
                numbers = (numbers - (1 << (BITS - 1))) * scale[None, :]
            else:
                shift = tl.load(shifts + group, mask=(columns >= 0) & is_half, other=0.0).to(tl.float32)
                if IS_ADDED:
                    numbers = numbers * scale[None, :] + shift[None, :]
                else:
                    numbers = (numbers - shift[None, :]) * scale[None, :]
            a = tl.load(x_rows + places[None, :], mask=is_input[None, :], other=0.0)
            b = numbers.to(x.dtype.element_ty)
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < T)[:, None] & (columns < N)[None, :],
    )
