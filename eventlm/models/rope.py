"""Tables of rotary position embedding, with the scalings that Llama checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eventlm.models.config import DecoderConfig, RopeConfig


class RopeTable:
    """Cosines and signed sines of every position below `max_positions`, computed once."""

    def __init__(self, config: DecoderConfig, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        cos, sin = angles(config, max_positions, dtype=dtype, device=device)
        self._cos = torch.cat((cos, cos), dim=-1)
        self._sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of these positions for `rotary_embedding`, each [tokens, 1, head_dim]."""
        return self._cos[positions_T].unsqueeze(1), self._sin[positions_T].unsqueeze(1)


def angles(
    config: DecoderConfig,
    max_positions: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position below `max_positions`, each [max_positions, head_dim / 2].

    Always computed in float32 on the CPU, so that they are the same for every `device`.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles_PD = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
    return angles_PD.cos().to(device, dtype), angles_PD.sin().to(device, dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2].

    `linear` divides all of them (Chen et al., 2023); `llama3` divides the slow ones, keeps the fast ones, and
    blends in between (Llama 3.1).
    """
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    return frequencies
