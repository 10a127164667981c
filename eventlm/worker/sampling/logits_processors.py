"""What a request's parameters do to its logits before a token is drawn, in the order of vLLM's V1 engine: its grammar,
allowed ids, bad words, min_tokens, logit_bias, then penalties.

Something is always left to be drawn: a later one of the first four that would leave nothing does not hold.

All work in place on float32 logits [S, V], over those rows alone that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from eventlm.worker.sampling.sampling_table import (
    ALLOWED,
    BANNED,
    BIASED,
    GRAMMAR,
    PENALIZED,
    SampledRows,
    SamplingTable,
    TokenLists,
    column,
    to_device,
)
from eventlm.worker.sampling.vocabulary_masks import unpack_mask

#: Penalizes these numbers of the rows, whose tokens the table counts, in place.
Penalize = Callable[[Tensor, SampledRows, np.ndarray, SamplingTable], None]


def process_logits(
    logits_SV: Tensor, rows: SampledRows, table: SamplingTable, *, penalize: Penalize | None = None
) -> None:
    """Apply everything that any of the rows asks for; penalties by `penalize`, if given."""
    needs = rows.params["needs"]
    asked = int(np.bitwise_or.reduce(needs))
    if asked & GRAMMAR:
        _match(logits_SV, rows, table)
    if asked & (ALLOWED | BANNED):
        _restrict(logits_SV, rows, table)
    if asked & BIASED:
        biased = np.flatnonzero(needs & BIASED).tolist()
        lists = [table.lists[int(rows.slots[number])] for number in biased]
        indices = _places(biased, [each.bias_ids for each in lists], logits_SV)
        values = to_device(np.concatenate([each.bias_values for each in lists]), logits_SV.device)
        logits_SV.index_put_(indices, values, accumulate=True)
    if asked & PENALIZED:
        (penalize or _penalize)(logits_SV, rows, np.flatnonzero(needs & PENALIZED), table)


def _match(logits_SV: Tensor, rows: SampledRows, table: SamplingTable) -> None:
    """Minus infinity for what a grammar, a list of allowed ids or a ban excludes."""
    needs = rows.params["needs"]
    numbers = np.flatnonzero(needs & GRAMMAR)
    assert rows.masks is not None
    may_RV = unpack_mask(rows.masks[numbers], logits_SV.shape[1])
    for index in np.flatnonzero(needs[numbers] & (ALLOWED | BANNED)).tolist():
        _narrow(may_RV[index], table.lists[int(rows.slots[numbers[index]])])
    never_RV = to_device(~may_RV, logits_SV.device)
    if len(numbers) == len(logits_SV):
        logits_SV.masked_fill_(never_RV, -torch.inf)
    else:
        indices = to_device(numbers, logits_SV.device)
        logits_SV[indices] = logits_SV[indices].masked_fill_(never_RV, -torch.inf)


def _narrow(may_V: np.ndarray, lists: TokenLists) -> None:
    """Leave of what may be drawn what is allowed, unless that is nothing; of that what is not banned, likewise."""
    if len(lists.allowed):
        allowed = lists.allowed[may_V[lists.allowed]]
        if len(allowed):
            may_V[:] = False
            may_V[allowed] = True
    bans = _bans(lists)
    bans = bans[may_V[bans]]
    if len(np.unique(bans)) < np.count_nonzero(may_V):
        may_V[bans] = False


def _restrict(logits_SV: Tensor, rows: SampledRows, table: SamplingTable) -> None:
    """Minus infinity for what may not be drawn, in rows without a grammar."""
    needs = rows.params["needs"]
    kept_rows, kept, banned_rows, banned = [], [], [], []
    for number in np.flatnonzero(((needs & (ALLOWED | BANNED)) > 0) & ((needs & GRAMMAR) == 0)).tolist():
        lists = table.lists[int(rows.slots[number])]
        bans = _bans(lists)
        if needs[number] & ALLOWED:
            left = lists.allowed[~np.isin(lists.allowed, bans)]
            kept_rows.append(number)
            kept.append(left if len(left) else lists.allowed)
        elif len(bans):
            banned_rows.append(number)
            banned.append(bans)
    if kept_rows:
        indices = _places(kept_rows, kept, logits_SV)
        values = logits_SV[indices]
        logits_SV.index_fill_(0, to_device(np.array(kept_rows), logits_SV.device), -torch.inf)
        logits_SV.index_put_(indices, values)
    if banned_rows:
        indices = _places(banned_rows, banned, logits_SV)
        logits_SV.index_put_(indices, logits_SV.new_full((), -torch.inf))


def _bans(lists: TokenLists) -> np.ndarray:
    """Token ids that the sequence may not continue with now."""
    sequence, history = lists.sequence, lists.sequence.token_ids
    # Only what was drawn makes a word bad, not what the prompt ends with: vLLM's meaning.
    words = [
        word[-1]
        for word in lists.bad_words
        if len(word) <= sequence.position + 1 and tuple(history[1 - len(word) :]) == word[:-1]
    ]
    parts = [lists.banned, np.array(words, dtype=np.int64)]
    if sequence.position < sequence.params.min_tokens:
        parts.append(lists.ends)
    return np.concatenate(parts)


def _penalize(logits_SV: Tensor, rows: SampledRows, numbers: np.ndarray, table: SamplingTable) -> None:
    """Repetition (Keskar et al., 2019) on prompt and output, frequency and presence (OpenAI) on the output."""
    params, device = rows.params[numbers], logits_SV.device
    seen = table.counts.take(params["counts_row"])
    # What is written twice is the same.
    is_padding = seen.ids < 0
    ids = np.where(is_padding, seen.ids[:, :1], seen.ids)
    indices = (to_device(numbers, device)[:, None], to_device(ids, device))
    counts = to_device(np.where(is_padding, seen.counts[:, :1], seen.counts), device)
    logits, repetition = logits_SV[indices], column(params, "repetition_penalty", device)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= column(params, "frequency_penalty", device) * counts
    logits -= column(params, "presence_penalty", device) * (counts > 0)
    logits_SV.index_put_(indices, logits)


def _places(numbers: Seq[int], ids: Seq[np.ndarray], logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """(row, token id) of each id of each row, flat."""
    rows = np.repeat(np.array(numbers, dtype=np.int64), [len(each) for each in ids])
    device = logits_SV.device
    return to_device(rows, device), to_device(np.concatenate(ids), device)
