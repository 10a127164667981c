"""Root mean square layer norm (Zhang and Sennrich, 2019) on a GPU, alone and after an addition to the residual stream.

Computed in float32 and rounded where transformers' LlamaRMSNorm rounds: the sum of the stream, the normalized numbers,
and their product with the weight. Shapes: T tokens, H hidden size, which may be any.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from eventlm.kernels.gpu.tuned import next_power_of_2, tuned


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` of each row, [T, H] in x's dtype, into `out` if given, which may be x.

    Rows may lie apart; the last dimension must be dense.
    """
    num_tokens, hidden_size = x_TH.shape
    out = torch.empty((num_tokens, hidden_size), dtype=x_TH.dtype, device=x_TH.device) if out is None else out
    _rms_norm_kernel[(num_tokens,)](
        x_TH, weight_H, out, eps, x_TH.stride(0), out.stride(0), hidden_size, **_config(hidden_size)
    )
    return out


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> None:
    """Add x to the residual stream and put the norm of the sum into x; both are [T, H] of one dtype.

    Rows may lie apart; the last dimension must be dense.
    """
    num_tokens, hidden_size = x_TH.shape
    _add_rms_norm_kernel[(num_tokens,)](
        x_TH, residual_TH, weight_H, eps, x_TH.stride(0), residual_TH.stride(0), hidden_size, **_config(hidden_size)
    )


def _config(hidden_size: int) -> dict[str, int]:
    return {"BLOCK": next_power_of_2(hidden_size), **tuned("rms_norm", hidden_size=hidden_size)}


# The weight is loaded before the sum over the row, so that it arrives meanwhile.


@triton.jit
def _normalized(values, weight, eps, H: tl.constexpr, DTYPE: tl.constexpr):
    """Norm in DTYPE of one row of float32 numbers, which are 0 beyond H."""
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / H + eps)
    return ((values * inverse).to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE)


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, x_stride, out_stride, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    values = tl.load(x + token * x_stride + columns, mask=mask, other=0.0)
    factors = tl.load(weight + columns, mask=mask, other=0.0)
    normalized = _normalized(values.to(tl.float32), factors, eps, H, out.dtype.element_ty)
    tl.store(out + token * out_stride + columns, normalized, mask=mask)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, eps, x_stride, residual_stride, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < H
    x_row, residual_row = x + token * x_stride + columns, residual + token * residual_stride + columns
    added = tl.load(x_row, mask=mask, other=0.0).to(tl.float32)
    stream = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=mask, other=0.0)
    total = (stream + added).to(residual.dtype.element_ty)
    tl.store(residual_row, total, mask=mask)
    tl.store(x_row, _normalized(total.to(tl.float32), factors, eps, H, x.dtype.element_ty), mask=mask)
