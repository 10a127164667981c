"""Tables of rotary position embedding, with the scalings that checkpoints use, as transformers computes them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.models.spec import ModelSpec, RopeSpec


class Rotation(NamedTuple):
    """What `rotary_embedding` takes beside the heads; cosines and signed sines are [tokens, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool


class RopeTable:
    """Cosines and signed sines of every position below `max_positions`, computed once."""

    def __init__(self, rope: RopeSpec, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        cos, sin = angles(rope, max_positions, dtype=dtype, device=device)
        self._is_interleaved = rope.is_interleaved
        if rope.is_interleaved:
            self._cos = torch.stack((cos, cos), dim=-1).flatten(-2)
            self._sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            self._cos = torch.cat((cos, cos), dim=-1)
            self._sin = torch.cat((-sin, sin), dim=-1)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of tokens at these positions."""
        return Rotation(self._cos[positions_T].unsqueeze(1), self._sin[positions_T].unsqueeze(1), self._is_interleaved)


def rope_tables(model: ModelSpec, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> list[RopeTable]:
    """One for each of `ModelSpec.ropes`, as `Decoder.forward` takes them."""
    return [RopeTable(rope, max_positions, dtype=dtype, device=device) for rope in model.ropes]


def angles(
    rope: RopeSpec,
    max_positions: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position below `max_positions`, each [max_positions, rotary_dim / 2].

    Both are multiplied by the attention factor. Always computed in float32 on the CPU, so that they are the same for
    every `device`.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles_PR = torch.outer(positions, inverse_frequencies(rope, max_positions))
    cos, sin = angles_PR.cos() * rope.attention_factor, angles_PR.sin() * rope.attention_factor
    return cos.to(device, dtype), sin.to(device, dtype)


def inverse_frequencies(rope: RopeSpec, max_positions: int) -> Tensor:
    """Angle per position of each pair of elements, float32 [rotary_dim / 2].

    `linear` divides all of them (Chen et al., 2023); `llama3` divides the slow ones, keeps the fast ones, and
    blends in between (Llama 3.1), and so does `yarn` by the number of the pair (Peng et al., 2023). `longrope` divides
    each by a factor of its own (Ding et al., 2024): by the long one at all positions if `max_positions` are more than
    the model was first trained with, as vLLM does, where transformers decides that for each sequence by its length.
    `proportional` divides all, and turns only the first pairs (Gemma 4).
    """
    powers = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    if rope.type == "longrope":
        is_long = max_positions > rope.original_max_position_embeddings
        return 1.0 / (torch.tensor(rope.long_factor if is_long else rope.short_factor) * powers)
    frequencies = 1.0 / powers
    if rope.type == "proportional":
        frequencies[rope.num_pairs :] = 0
    if rope.type in ("linear", "proportional"):
        return frequencies / rope.factor
    if rope.type == "llama3":
        rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    if rope.type == "yarn":
        keep = _yarn_keep(rope)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    return frequencies


def _yarn_keep(rope: RopeSpec) -> Tensor:
    """How much of each pair's frequency yarn keeps, 1 for the fast ones, [rotary_dim / 2]."""

    def pair_of(num_rotations: float) -> float:
        """The pair that turns so often in the original context, a fraction among them."""
        wavelength = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    # Where they are the same, transformers has the second a little larger.
    pairs = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
