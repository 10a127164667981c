"""The gate of GeGLU (Shazeer, 2020) on a GPU, with the exact GELU or its approximation by tanh."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.sizes import ceil_div
from eventlm.kernels.gpu.tuned import tuned


def gelu_mul(gate_up_TM: Tensor, approximate: Literal["none", "tanh"], out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` [T, N], where a row of `gate_up_TM` [T, 2 * N] is gate, then up; into `out` if given.

    All are of one dtype. Rows may lie apart; the last dimension must be dense. approximate: as in
    `torch.nn.functional.gelu`.
    """
    num_tokens, size = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up_TM.dtype, device=gate_up_TM.device) if out is None else out
    config = tuned("gelu_mul")
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    _gelu_mul_kernel[grid](
        gate_up_TM, out, gate_up_TM.stride(0), out.stride(0), size, TANH=approximate == "tanh", **config
    )
    return out


def gelu_mul_reference(gate_up: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """The same in torch, over the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


@triton.jit
def _gelu_mul_kernel(
    gate_up, out, gate_up_stride, out_stride, N: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    row = gate_up + token * gate_up_stride + columns
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + N, mask=mask, other=0.0).to(tl.float32)
    if TANH:
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2z)); here 2z, which has sqrt(2 / pi) twice.
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gated = gate / (1 + tl.exp(-twice))
    else:
        gated = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # Rounded between the two operations, as in transformers.
    gated = gated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * out_stride + columns, (gated * up).to(out.dtype.element_ty), mask=mask)
