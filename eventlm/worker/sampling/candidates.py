"""The most likely entries of each row, found without an order of all, and what min-p, top-k and top-p leave of them.

Equal logits are ordered by token id, so that what a row is left with never depends on how many candidates were asked
for. Shapes: S rows, C candidates, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eventlm.worker.sampling.sampling_table import column

#: Neighbouring entries of which only the largest is looked at first.
_CHUNK = 64
#: Entries whose exponentials are taken at once, so that they stay in the processor's cache.
_CACHED_ENTRIES = 1 << 17


class Candidates(NamedTuple):
    """scores_SC: logits over temperature, float32, most likely first, minus infinity where a mask removes the entry.
    ids_SC: which entries, int64. short_S: whether the row needs more candidates than it was given.
    """

    scores: Tensor
    ids: Tensor
    short: Tensor


def top_entries(logits_SV: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """Values and ids [S, num_entries] of the largest logits, as float32, largest first, the lower id first of equals.
    NaN counts as plus infinity.

    The entries of the chunks whose largest are the largest contain them: any other entry has as many before it.
    """
    num_rows, vocab_size = logits_SV.shape
    device = logits_SV.device
    num_chunks = vocab_size // _CHUNK
    if 2 * num_entries > num_chunks:
        ids = torch.arange(vocab_size, device=device).expand(num_rows, -1)
        return _ordered(logits_SV, ids, num_entries)
    chunked = logits_SV[:, : num_chunks * _CHUNK].view(num_rows, num_chunks, _CHUNK)
    chunk_numbers = torch.arange(num_chunks, device=device).expand(num_rows, -1)
    _, chunks = _ordered(chunked.amax(dim=-1), chunk_numbers, num_entries)
    ids = (chunks[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=device)).flatten(1)
    # What does not fill a chunk is always looked at.
    rest = torch.arange(num_chunks * _CHUNK, vocab_size, device=device).expand(num_rows, -1)
    ids = torch.cat((ids, rest), dim=1)
    return _ordered(logits_SV.gather(1, ids), ids, num_entries)


def _ordered(values: Tensor, ids: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    # The bits of NaN sort last or first, by its sign.
    values = values.float().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # Floats as integers in the same order; adding 0 makes minus zero zero.
    bits = (values + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() * (1 << 32) - ids
    indices = order.topk(num_entries, dim=-1).indices
    return values.gather(1, indices), ids.gather(1, indices)


def mask_candidates(logits_SV: Tensor, params: np.ndarray, num_candidates: int) -> Candidates:
    """The best `num_candidates` over temperature, less what min-p, then top-k, then top-p remove.

    logits_SV: any floating dtype. params: of each row, see `sampling_table.PARAMS_DTYPE`. top-p leaves the fewest
    entries that together have at least top_p of what min-p and top-k left.
    """
    vocab_size = logits_SV.shape[1]
    device = logits_SV.device
    temperature, top_k = column(params, "temperature", device), column(params, "top_k", device)
    top_p = column(params, "top_p", device)
    values, ids = top_entries(logits_SV, num_candidates)
    scores = values / temperature
    floor = scores[:, :1] + column(params, "log_min_p", device)
    ranks = torch.arange(num_candidates, device=device)
    is_out = (scores < floor) | ((ranks >= top_k) & (top_k > 0))
    is_out[:, 0] = False
    # All that min-p and top-k would leave is among the candidates.
    is_whole = (top_k > 0) & (top_k <= num_candidates) | (scores[:, -1:] < floor)
    scores = scores.masked_fill(is_out, -torch.inf)
    total = scores.logsumexp(dim=-1, keepdim=True)
    unmasked = np.flatnonzero((params["top_k"] == 0) & np.isneginf(params["log_min_p"]))
    if len(unmasked) and num_candidates < vocab_size:
        numbers = torch.from_numpy(unmasked).to(device)
        total[numbers] = _log_totals(logits_SV, numbers, temperature[numbers])
    probabilities = (scores - total).double().exp()
    reached = probabilities.cumsum(dim=-1)
    is_beyond = reached - probabilities >= top_p
    is_beyond[:, 0] = False
    short = ~is_whole
    if num_candidates == vocab_size:
        short = torch.zeros_like(short)
    elif len(unmasked):
        short[numbers] &= reached[numbers, -1:] < top_p[numbers]
    return Candidates(scores.masked_fill(is_beyond, -torch.inf), ids, short[:, 0])


def _log_totals(logits_SV: Tensor, numbers_R: Tensor, temperature_R1: Tensor) -> Tensor:
    """Logarithm of the sum of exp(logit / temperature) over the vocabulary, [R, 1]."""
    totals = torch.empty_like(temperature_R1)
    num_rows = max(1, _CACHED_ENTRIES // logits_SV.shape[1])
    for start in range(0, len(numbers_R), num_rows):
        span = slice(start, start + num_rows)
        scaled = logits_SV[numbers_R[span]] / temperature_R1[span]
        best = scaled.amax(dim=-1, keepdim=True)
        totals[span] = scaled.sub_(best).exp_().sum(dim=-1, keepdim=True).log_().add_(best)
    return totals
