"""The gate of SwiGLU (Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where the last dimension of `gate_up` [..., 2 * N] is gate, then up; returns [...,
    N].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
