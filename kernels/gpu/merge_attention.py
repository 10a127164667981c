"""Merging attention over parts of a context by the log-sum-exps of their scores.

Shapes: R rows, H query heads, S parts, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import next_power_of_2, tuned


def merge_attention(partial_RHSD: Tensor, lse_RHS: Tensor, out_RHD: Tensor, lse_RH: Tensor | None = None) -> None:
    """Write the attention over all parts to `out_RHD` and, where given, its log-sum-exps to `lse_RH`.

    partial_RHSD: any floating type; each part is normalised for itself. lse_RHS: float32, natural logarithms of the
    sums of exp(score); minus infinity for a part with nothing in it, whose partial may be anything. Where all are, out
    is zeros and the log-sum-exp minus infinity. lse_RH: float32. The strides may be any but the last of partial and
    out, so that parts [S, R, H, D] that lie one after the other need only be permuted.
    """
    num_rows, num_heads, num_parts, head_dim = partial_RHSD.shape
    _merge_attention[(num_rows, num_heads)](
        partial_RHSD,
        lse_RHS,
        out_RHD,
        lse_RHS if lse_RH is None else lse_RH,
        num_parts,
        *partial_RHSD.stride()[:3],
        *lse_RHS.stride(),
        *out_RHD.stride()[:2],
        *((0, 0) if lse_RH is None else lse_RH.stride()),
        HEAD_DIM=head_dim,
        WITH_LSE=lse_RH is not None,
        BLOCK_S=next_power_of_2(num_parts),
        BLOCK_D=next_power_of_2(head_dim),
        **tuned("merge_attention"),
    )


@triton.jit
def _merge_attention(
    partial_ptr,
    lse_ptr,
    out_ptr,
    out_lse_ptr,
    num_parts,
    stride_partial_row,
    stride_partial_head,
    stride_partial_part,
    stride_lse_row,
    stride_lse_head,
    stride_lse_part,
    stride_out_row,
    stride_out_head,
    stride_out_lse_row,
    stride_out_lse_head,
    HEAD_DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row and head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse_ptrs = lse_ptr + row * stride_lse_row + head * stride_lse_head + offs_s * stride_lse_part
    lse = tl.load(lse_ptrs, mask=offs_s < num_parts, other=float("-inf"))
    is_full = lse != float("-inf")
    highest = tl.max(lse, 0)
    # Of nothing but empty parts the differences would be no numbers.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2((lse - highest) * 1.4426950408889634)
    total = tl.sum(weights, 0)
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    partial_ptrs = partial_ptr + row * stride_partial_row + head * stride_partial_head
    partial = tl.load(
        partial_ptrs + offs_s[:, None].to(tl.int64) * stride_partial_part + offs_d,
        mask=is_full[:, None] & (offs_d < HEAD_DIM),
        other=0.0,
    ).to(tl.float32)
    out = tl.sum(partial * weights[:, None], 0) / total
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + offs_d
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
    if WITH_LSE:
        out_lse = tl.where(is_empty, float("-inf"), highest + tl.log(total))
        tl.store(out_lse_ptr + row * stride_out_lse_row + head * stride_out_lse_head, out_lse)
