"""Picks the next token of each row: greedy, or by temperature, top-k and top-p with keyed noise.

A token is drawn as the argmax of logits / temperature + Gumbel noise (Gumbel, 1954; Maddison et al., 2014).
The noise of a vocabulary entry is a hash of (request's seed, index of the sequence, position in its output,
entry): it does not depend on the neighbours in the batch, on earlier draws, or on what the masks left, so a
sequence that is recomputed draws what it drew before.

Shapes: S rows, C candidates, V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.sampler_params import SamplerParams

#: Candidates that a row with top_p alone is first given; if they hold less than top_p, it gets the
#: vocabulary.
_NUM_NUCLEUS_CANDIDATES = 512
#: Noise that is made at once, so that it stays in the processor's cache.
_NOISE_ENTRIES = 1 << 17


class SampledRow(NamedTuple):
    """What decides a row's draw besides its logits. `position` counts the output tokens before it."""

    params: SamplerParams
    sequence_index: int
    position: int


def sample(logits_SV: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """One token id a row. `logits_SV`: any floating dtype."""
    tokens = [0] * len(rows)
    greedy, masked, free = [], [], []
    for number, (params, _, _) in enumerate(rows):
        if params.temperature == 0.0 or params.top_k == 1:
            greedy.append(number)
        elif params.top_k > 0 or params.top_p < 1.0:
            masked.append(number)
        else:
            free.append(number)
    for numbers, draw in ((greedy, _draw_greedy), (masked, _draw_masked), (free, _draw_free)):
        if numbers:
            subset = logits_SV if len(numbers) == len(rows) else logits_SV[numbers]
            for number, token in zip(numbers, draw(subset, [rows[n] for n in numbers]), strict=True):
                tokens[number] = token
    return tokens


def _draw_greedy(logits_SV: Tensor, rows: list[SampledRow]) -> list[int]:
    return logits_SV.max(dim=-1).indices.tolist()


def _draw_free(logits_SV: Tensor, rows: list[SampledRow]) -> list[int]:
    """From the whole vocabulary."""
    ids_V = torch.arange(logits_SV.shape[1], dtype=torch.int32, device=logits_SV.device)
    num_rows = max(1, _NOISE_ENTRIES // logits_SV.shape[1])
    tokens: list[int] = []
    for start in range(0, len(rows), num_rows):
        part = rows[start : start + num_rows]
        scores = _scaled(logits_SV[start : start + len(part)], part)
        tokens += scores.add_(gumbel_noise(noise_keys(part, scores.device), ids_V)).max(dim=-1).indices.tolist()
    return tokens


def _draw_masked(logits_SV: Tensor, rows: list[SampledRow]) -> list[int]:
    """From the most likely entries, which are cheaper to find than the order of all."""
    vocab_size = logits_SV.shape[1]
    scaled_SV = _scaled(logits_SV, rows)
    num_candidates = max(row.params.top_k or _NUM_NUCLEUS_CANDIDATES for row in rows)
    candidates = mask_candidates(scaled_SV, [row.params for row in rows], min(num_candidates, vocab_size))
    tokens = _draw_candidates(candidates, rows)
    short = candidates.short.nonzero().flatten().tolist()
    if short:
        short_rows = [rows[number] for number in short]
        candidates = mask_candidates(scaled_SV[short], [row.params for row in short_rows], vocab_size)
        for number, token in zip(short, _draw_candidates(candidates, short_rows), strict=True):
            tokens[number] = token
    return tokens


class Candidates(NamedTuple):
    """The most likely entries of each row, most likely first.

    scores_SC: scaled logits, minus infinity where a mask removes the entry. ids_SC: which entries. short_S:
    whether the row needs more candidates than it was given.
    """

    scores: Tensor
    ids: Tensor
    short: Tensor


def mask_candidates(scaled_SV: Tensor, params: Sequence[SamplerParams], num_candidates: int) -> Candidates:
    """Apply top-k, then top-p to what it left: the fewest entries that together have at least top_p.

    `scaled_SV`: float32 logits over temperature.
    """
    vocab_size = scaled_SV.shape[1]
    device = scaled_SV.device
    scores, ids = scaled_SV.topk(num_candidates, dim=-1)
    top_k_S = torch.tensor([p.top_k or vocab_size for p in params], device=device)
    top_p_S = torch.tensor([p.top_p if p.top_p < 1.0 else math.inf for p in params], dtype=torch.float64, device=device)
    ranks = torch.arange(num_candidates, device=device)
    scores = scores.masked_fill(ranks >= top_k_S[:, None], -torch.inf)
    has_top_k = top_k_S <= num_candidates
    total_S = torch.where(has_top_k, scores.logsumexp(dim=-1), scaled_SV.logsumexp(dim=-1))
    probabilities = (scores - total_S[:, None]).double().exp()
    reached = probabilities.cumsum(dim=-1)
    scores = scores.masked_fill(reached - probabilities >= top_p_S[:, None], -torch.inf)
    # The best entry stays, whatever rounding says.
    scores[:, 0] = scaled_SV.amax(dim=-1)
    short = ~has_top_k & (reached[:, -1] < top_p_S) & (num_candidates < vocab_size)
    return Candidates(scores, ids, short)


def _draw_candidates(candidates: Candidates, rows: list[SampledRow]) -> list[int]:
    noise = gumbel_noise(noise_keys(rows, candidates.ids.device), candidates.ids.to(torch.int32))
    best = (candidates.scores + noise).argmax(dim=-1, keepdim=True)
    return candidates.ids.gather(1, best).flatten().tolist()


def _scaled(logits_SV: Tensor, rows: list[SampledRow]) -> Tensor:
    temperatures = torch.tensor([row.params.temperature for row in rows], device=logits_SV.device)
    return logits_SV.float() / temperatures[:, None]


def noise_keys(rows: Sequence[SampledRow], device: torch.device) -> Tensor:
    """Two 32-bit keys a row, int32 [S, 2], from its request's seed, its index and its position."""
    digests = b"".join(
        blake2b(struct.pack("<QQQ", params.seed, index, position), digest_size=8).digest()
        for params, index, position in rows
    )
    return torch.frombuffer(bytearray(digests), dtype=torch.int32).view(-1, 2).to(device)


def gumbel_noise(keys_S2: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of these vocabulary entries under each row's keys, float32 [S, C].

    keys_S2: see `noise_keys`. ids: int32 [C] or [S, C].
    """
    key_0, key_1 = keys_S2.unsqueeze(-1).unbind(1)
    bits = _mix(ids) ^ key_0
    bits = _mix(bits).add_(key_1)
    uniform = _mix(bits).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # In (0, 1), and fine-grained near 0, where the largest noise comes from.
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: Tensor) -> Tensor:
    """A bijective hash of 32-bit integers ("lowbias32", Wellons, 2018), in wrap-around int32 arithmetic."""
    bits = bits ^ _shift_right(bits, 16)
    bits.mul_(0x7FEB352D)
    bits.bitwise_xor_(_shift_right(bits, 15))
    bits.mul_(0x846CA68B - (1 << 32))
    return bits.bitwise_xor_(_shift_right(bits, 16))


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Zeros move in from the left, as if the integers were unsigned."""
    return (bits >> places).bitwise_and_((1 << (32 - places)) - 1)
