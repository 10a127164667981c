"""Tables of rotary position embedding, with the scalings that checkpoints use, as transformers computes them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from eventlm.models.spec import ModelSpec, RopeSpec


class Rotation(NamedTuple):
    """What `rotary_embedding` takes beside the heads; cosines and signed sines are [tokens, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool


class RopeTable:
    """The rotation of every position below `max_positions`."""

    def __init__(self, rope: RopeSpec, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._cos, self._sin = angles(rope, max_positions, dtype=dtype, device=device)
        self._num_still = rope.rotary_dim // 2 - rope.num_turned
        self._is_interleaved = rope.is_interleaved

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of tokens at these positions."""
        cos, sin = self._cos[positions_T], self._sin[positions_T]
        if self._num_still:
            cos, sin = pad(cos, (0, self._num_still), value=1.0), pad(sin, (0, self._num_still))
        if self._is_interleaved:
            cos, sin = _of_neighbours(cos, sin)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1), self._is_interleaved)


def rope_tables(model: ModelSpec, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> list[RopeTable]:
    """One for each of `ModelSpec.ropes`, as `Decoder.forward` takes them."""
    return [RopeTable(rope, max_positions, dtype=dtype, device=device) for rope in model.ropes]


def compiled_angles(rope: RopeSpec, max_positions: int) -> tuple[Tensor, Tensor]:
    """`angles` as the compiled decoder reads them: of neighbours, there for both, the sine of the first negative."""
    cos, sin = angles(rope, max_positions)
    return _of_neighbours(cos, sin) if rope.is_interleaved else (cos, sin)


def angles(
    rope: RopeSpec,
    max_positions: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position below `max_positions`, each [max_positions, `RopeSpec.num_turned`].

    Both are multiplied by the attention factor. Always computed in float32 on the CPU, so that they are the same for
    every `device`.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    cos = torch.outer(positions, inverse_frequencies(rope, max_positions))
    sin = cos.sin().mul_(rope.attention_factor)
    # In place, for they may be large.
    cos.cos_().mul_(rope.attention_factor)
    return cos.to(device, dtype), sin.to(device, dtype)


def _of_neighbours(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What both elements of each pair are multiplied by, one beside the other."""
    return torch.stack((cos, cos), dim=-1).flatten(-2), torch.stack((-sin, sin), dim=-1).flatten(-2)


def inverse_frequencies(rope: RopeSpec, max_positions: int) -> Tensor:
    """Angle per position of each pair of elements that turns, float32 [`RopeSpec.num_turned`].

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
    frequencies = (1.0 / powers)[: rope.num_turned]
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
