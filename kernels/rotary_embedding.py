"""Rotary position embedding (Su et al., 2021), in the halves layout of the Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Each head of each token turned by its position's angles.

    x_THD: [tokens, heads, head_dim]. cos_T1D, sin_T1D: [tokens, 1, head_dim], both halves of the last
    dimension alike but for the sign of the sine, which is negative in the first. Returns a new tensor like
    x_THD.
    """
    first, second = x_THD.chunk(2, dim=-1)
    return torch.addcmul(x_THD * cos_T1D, torch.cat((second, first), dim=-1), sin_T1D)
