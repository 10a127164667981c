"""A product with a matrix of codes of 4 or 8 bits on a GPU, or of each expert, which stay packed in its memory.

Codes become numbers of the type of x in registers, tile by tile, for the tensor cores to multiply by. A row's result
does not depend on the others if the configuration does not, which `is_invariant` sees to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.grouped_gemm import expert_of_tile, most_tiles
from eventlm.kernels.gpu.interpreter import UPCAST
from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.kernels.gpu.tuned import ceil_div, next_power_of_2, tuned


def packed_matmul(
    x_TK: Tensor,
    weight: PackedWeight,
    bias_N: Tensor | None = None,
    *,
    offsets_E1: Tensor | None = None,
    is_invariant: bool = False,
    config: Mapping[str, int] | None = None,
) -> Tensor:
    """`x @ weight.T + bias` [T, N]; sums are taken in float32 and rounded once.

    x and bias are of one dtype: bfloat16, float16 or float32 (without TF32), to which the weight's numbers are rounded.
    Rows of x may lie apart; the last dimension must be dense. offsets_E1: of experts' weights, as `grouped_gemm` takes
    them, which has the same of floats; bias_N is of all experts then. is_invariant: one configuration for any number of
    rows.
    """
    T, N = len(x_TK), weight.num_out
    num_experts = 1 if offsets_E1 is None else len(weight.codes)
    out = torch.empty((T, N), dtype=x_TK.dtype, device=x_TK.device)
    if config is None:
        config = tuned("packed_matmul", **({} if is_invariant else {"rows": ceil_div(max(T, 1), num_experts)}))
    tiles_m = ceil_div(T, config["BLOCK_M"]) if offsets_E1 is None else most_tiles(T, num_experts, T, config["BLOCK_M"])
    codes, scales, shifts, code_type, num_in = weight
    if tiles_m:
        _packed_matmul_kernel[(ceil_div(N, config["BLOCK_N"]), tiles_m)](
            *(x_TK, codes, scales, shifts, bias_N, offsets_E1, out),
            *(T, N, x_TK.stride(0), codes.stride(-2), scales.stride(-2), out.stride(0)),
            *(0, 0) if offsets_E1 is None else (codes.stride(0), scales.stride(0)),
            K=num_in,
            BITS=code_type.bits,
            GROUP=code_type.group,
            IS_ADDED=code_type.shift == "added",
            IS_FLOAT=code_type.is_float,
            E=num_experts,
            EXPERTS=next_power_of_2(num_experts),
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
    offsets,
    out,
    T,
    N,
    x_stride,
    codes_stride,
    groups_stride,
    out_stride,
    expert_codes_stride,
    expert_groups_stride,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_ADDED: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each step of the loop takes a unit of 64 inputs, in two halves, which lie in one group each."""
    tile = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(columns, N - 1).to(tl.int64)
    groups = outputs * groups_stride
    code_rows = codes + outputs[None, :] * codes_stride
    if offsets is None:
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        end = T
    else:
        expert, before = expert_of_tile(offsets, tile, E, EXPERTS, BLOCK_M)
        if expert >= E:
            return
        rows = tl.load(offsets + expert) + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
        end = tl.load(offsets + expert + 1)
        code_rows += expert.to(tl.int64) * expert_codes_stride
        groups += expert.to(tl.int64) * expert_groups_stride

    # What is past the end is read from the last row, and not written.
    x_rows = x + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride
    inputs = tl.arange(0, 32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, 64):
        if BITS == 4:
            pairs = tl.load(code_rows + (start // 2 + inputs)[:, None])
        for half in tl.static_range(2):
            places = start + half * 32 + inputs
            # The second half of the last unit may not be there.
            is_input = places < K
            group = groups + (start + half * 32) // GROUP
            is_group = (columns < N) & (start + half * 32 < K)
            scale = tl.load(scales + group, mask=is_group, other=0.0).to(tl.float32)[None, :]
            if BITS == 4:
                found = (pairs >> (4 * half)) & 15
            else:
                found = tl.load(code_rows + places[:, None], mask=is_input[:, None], other=0)
            if IS_FLOAT:
                numbers = _floats(found) * scale
            elif shifts is None:
                numbers = (found.to(tl.float32) - (1 << (BITS - 1))) * scale
            else:
                shift = tl.load(shifts + group, mask=is_group, other=0.0).to(tl.float32)[None, :]
                if IS_ADDED:
                    numbers = found.to(tl.float32) * scale + shift
                else:
                    numbers = (found.to(tl.float32) - shift) * scale
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
        mask=(rows < end)[:, None] & (columns < N)[None, :],
    )


@triton.jit
def _floats(codes):
    """Floats of 4 bits (E2M1): 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero."""
    codes = codes.to(tl.int32)
    exponents, lowest = (codes >> 1) & 3, codes & 1
    # In halves.
    sizes = tl.where(exponents == 0, lowest, (2 + lowest) << (tl.maximum(exponents, 1) - 1))
    return tl.where(codes >= 8, -sizes, sizes).to(tl.float32) * 0.5
