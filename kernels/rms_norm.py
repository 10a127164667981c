"""Root mean square layer norm (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; the mean is taken in float32.

    x: [..., N], weight: [N] of the same dtype; returns [..., N].
    """
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
