"""The gate of SwiGLU (Shazeer, 2020) on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.sizes import ceil_div
from eventlm.kernels.gpu.tuned import tuned


def silu_mul(gate_up_TM: Tensor, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` [T, N], where a row of `gate_up_TM` [T, 2 * N] is gate, then up; into `out` if given.

    All are of one dtype. Rows may lie apart; the last dimension must be dense. `eventlm.kernels.silu_mul` is the same
    in torch.
    """
    num_tokens, size = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up_TM.dtype, device=gate_up_TM.device) if out is None else out
    config = tuned("silu_mul")
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    _silu_mul_kernel[grid](gate_up_TM, out, gate_up_TM.stride(0), out.stride(0), size, **config)
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, gate_up_stride, out_stride, N: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    row = gate_up + token * gate_up_stride + columns
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + N, mask=mask, other=0.0).to(tl.float32)
    # Rounded between the two operations, as in transformers.
    gated = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * out_stride + columns, (gated * up).to(out.dtype.element_ty), mask=mask)
