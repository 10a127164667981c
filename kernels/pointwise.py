"""Operations of a decoder layer on each token alone, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square layer norm (Zhang and Sennrich, 2019).

    That is `x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the mean is taken in float32. x: [..., N],
    weight: [N] of the same dtype; returns [..., N].
    """
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary_embedding(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of each head, in the halves layout of Hugging Face checkpoints.

    x_THD: [tokens, heads, head_dim]. cos_T1D, sin_T1D: [tokens, 1, head_dim], both halves of the last dimension alike,
    except that the sine is negative in the first. Returns a new tensor like x_THD.
    """
    first, second = x_THD.chunk(2, dim=-1)
    return torch.addcmul(x_THD * cos_T1D, torch.cat((second, first), dim=-1), sin_T1D)


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gate of SwiGLU (Shazeer, 2020): `silu(gate) * up` [..., N] of `gate_up` [..., 2 * N], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
