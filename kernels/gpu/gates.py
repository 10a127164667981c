"""The gates of SwiGLU and GeGLU (Shazeer, 2020) on a GPU.

Each gives `activation(gate) * up` [T, N], where a row of `gate_up_TM` [T, 2 * N] is gate, then up; into `out` if given.
All are of one dtype. Rows may lie apart; the last dimension must be dense.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import ceil_div, tuned


def silu_mul(gate_up_TM: Tensor, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`. `eventlm.kernels.pointwise.silu_mul` is the same in torch."""
    return _gate(gate_up_TM, out, "silu")


def gelu_mul(gate_up_TM: Tensor, approximate: Literal["none", "tanh"], out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up`, exact or by tanh: `approximate` is that of `torch.nn.functional.gelu`."""
    return _gate(gate_up_TM, out, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gate(gate_up_TM: Tensor, out: Tensor | None, activation: str) -> Tensor:
    num_tokens, size = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up_TM.dtype, device=gate_up_TM.device) if out is None else out
    config = tuned("gates")
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    _gate_kernel[grid](gate_up_TM, out, gate_up_TM.stride(0), out.stride(0), size, ACTIVATION=activation, **config)
    return out


@triton.jit
def _gate_kernel(
    gate_up, out, gate_up_stride, out_stride, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < N
    row = gate_up + token * gate_up_stride + columns
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + N, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gated = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2z)); here 2z, which has sqrt(2 / pi) twice.
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gated = gate / (1 + tl.exp(-twice))
    else:
        gated = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    # Rounded between the two operations, as in transformers.
    gated = gated.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * out_stride + columns, (gated * up).to(out.dtype.element_ty), mask=mask)
