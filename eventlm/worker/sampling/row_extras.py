"""What rows of a step give besides tokens, where their requests ask for it: log-probabilities and embeddings.

Log-probabilities are under the model's own logits, before any sampling parameter changes them. Shapes: T tokens of the
step, S rows that sample, N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eventlm.sampling_params import TokenLogprobs
from eventlm.worker.protocol import RowExtras
from eventlm.worker.sampling.candidates import top_entries
from eventlm.worker.sampling.sampler import NOT_FINITE, SLICE_ENTRIES, slices
from eventlm.worker.sequence_table import Row

#: Logits [n, V] of the tokens at these positions.
LogitsOf = Callable[[slice], Tensor]


class OutputLayer(Protocol):
    """What follows a model's layers."""

    vocab_size: int

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The final norm of the last layer's hidden states, [S, H]."""
        ...

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] of the last layer's hidden states."""
        ...


def row_extras(
    rows: Seq[Row],
    sampled_rows: list[int],
    forward: OutputLayer,
    hidden_TH: Tensor,
    logits_SV: Tensor | None,
    drawn: list[int],
) -> tuple[list[RowExtras], set[int]]:
    """The extras of each row that asked for any, and the numbers of the rows whose extras are not finite.

    `hidden_TH` is what the forward pass gave for the step's tokens, `sampled_rows` the numbers of the rows of
    `logits_SV`, which may be None where none of those asked.
    """
    asking = [number for number, row in enumerate(rows) if row.sequence.wants_extras]
    if not asking:
        return [], set()
    found: dict[int, dict[str, Any]] = {number: {} for number in asking}
    if logits_SV is not None:
        _add_logprobs(found, rows, sampled_rows, logits_SV, drawn)
    offsets = np.cumsum([0, *(row.num_tokens for row in rows)]).tolist()
    for number in asking:
        row = rows[number]
        own_TH = hidden_TH[offsets[number] : offsets[number + 1]]
        _add_prompt_logprobs(found[number], row, forward, own_TH)
        if row.sequence.kind == "pool" and (pooled_H := _pool(row, forward, own_TH)) is not None:
            found[number]["embedding"] = pooled_H.cpu().numpy().astype("<f4").tobytes()
    extras = [RowExtras(row=number, **fields) for number, fields in found.items() if fields]
    return extras, {each.row for each in extras if not _is_finite(each)}


def compute_logits_of_extras(rows: Seq[Row], forward: OutputLayer, hidden_TH: Tensor) -> None:
    """Take part in what `row_extras` computes on the rank that answers: the same logits, whose parts it lacks."""
    end = 0
    for row in rows:
        start, end = end, end + row.num_tokens
        if row.sequence.wants_extras and (asked := _prompt_span(row)) is not None:
            own_TH = hidden_TH[start:end]
            for span in slices(len(asked), forward.vocab_size, SLICE_ENTRIES):
                forward.logits(own_TH[span])


def _is_finite(extras: RowExtras) -> bool:
    """NaN or plus infinity anywhere in a row of logits makes its token's log-probability NaN or infinite."""
    values: list[Any] = [each.logprobs for each in (extras.logprobs, extras.prompt_logprobs) if each is not None]
    return all(np.isfinite(each).all() for each in [np.frombuffer(extras.embedding, "<f4"), *values])


def _add_logprobs(
    found: dict[int, dict[str, Any]], rows: Seq[Row], sampled_rows: list[int], logits_SV: Tensor, drawn: list[int]
) -> None:
    """Of the tokens just drawn, for all rows that asked at once."""
    wanted = [
        (index, count)
        for index, number in enumerate(sampled_rows)
        if (count := rows[number].sequence.params.logprobs) is not None and drawn[index] != NOT_FINITE
    ]
    if not wanted:
        return
    listed = {index: rows[sampled_rows[index]].sequence.params.logprob_token_ids for index, _ in wanted}
    # Rows that name tokens need none of the most likely ones.
    counts = [0 if listed[index] else count for index, count in wanted]
    indices = [index for index, _ in wanted]
    num_top = -1 if min(counts) < 0 else max(counts)
    drawn_ids = torch.tensor([drawn[index] for index in indices], device=logits_SV.device)
    logprobs = token_logprobs(lambda span: logits_SV[indices[span]], drawn_ids, logits_SV.shape[1], num_top)
    for index, (at, count) in enumerate(zip(indices, counts, strict=True)):
        found[sampled_rows[at]]["logprobs"] = one_of(logprobs, index, count, _of_named(logits_SV[at], listed[at]))


def _of_named(logits_V: Tensor, token_ids: list[int] | None) -> tuple[list[int], list[float]] | None:
    """The tokens that a request names, and their log-probabilities at a position with these logits."""
    if not token_ids:
        return None
    logits_V = logits_V.float()
    ids = torch.tensor(token_ids, device=logits_V.device)
    return token_ids, (logits_V[ids] - logits_V.logsumexp(dim=-1)).tolist()


def _add_prompt_logprobs(fields: dict[str, Any], row: Row, forward: OutputLayer, own_TH: Tensor) -> None:
    """Of the prompt tokens that follow those of the row; the last one's follower is output, or in the next chunk."""
    asked = _prompt_span(row)
    if asked is None:
        return
    token_ids = torch.tensor(row.sequence.token_ids[asked.start : asked.stop], device=own_TH.device)
    fields["prompt_start"] = asked.start
    fields["prompt_logprobs"] = token_logprobs(
        lambda span: forward.logits(own_TH[span]),
        token_ids,
        forward.vocab_size,
        row.sequence.params.prompt_logprobs or 0,
    )


def _prompt_span(row: Row) -> range | None:
    """Positions of the prompt tokens whose log-probabilities the row gives; None if it gives none."""
    sequence = row.sequence
    if sequence.params.prompt_logprobs is None and sequence.kind != "score":
        return None
    start = row.start + 1
    return range(start, min(start + row.num_tokens, sequence.num_prompt_tokens)) or None


def _pool(row: Row, forward: OutputLayer, own_TH: Tensor) -> Tensor | None:
    """The embedding after the last chunk of a prompt, [H]. Earlier chunks add to the sum of a mean."""
    sequence = row.sequence
    is_complete = row.start + row.num_tokens == sequence.num_prompt_tokens
    if sequence.params.pooling == "last":
        return forward.norm(own_TH[-1:])[0].float() if is_complete else None
    sum_H = forward.norm(own_TH).double().sum(dim=0)
    # A prompt that is computed again starts anew.
    before_H = sequence.hidden_sum_H if row.start else None
    sequence.hidden_sum_H = sum_H = sum_H if before_H is None else before_H + sum_H
    return (sum_H / sequence.num_prompt_tokens).float() if is_complete else None


def token_logprobs(logits_of: LogitsOf, token_ids_N: Tensor, vocab_size: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of each token, and the `num_top` most likely ones at its position (all, if negative).

    The logits, of any floating dtype, are asked for in slices, so that no more than 16 MiB of them are there in
    float32 at a time. Equal ones rank by token id.
    """
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    found = TokenLogprobs(logprobs=[], ranks=[], top_ids=[], top_logprobs=[])
    for span in slices(len(token_ids_N), vocab_size, SLICE_ENTRIES):
        logits = logits_of(span).float()
        ids = token_ids_N[span, None]
        total, own = logits.logsumexp(dim=-1, keepdim=True), logits.gather(1, ids)
        entries = torch.arange(vocab_size, device=logits.device)
        is_before = (logits > own) | ((logits == own) & (entries < ids))
        found.logprobs.extend((own - total).flatten().tolist())
        found.ranks.extend((is_before.sum(dim=-1) + 1).tolist())
        if num_top:
            values, top_ids = top_entries(logits, num_top)
            found.top_ids.extend(top_ids.tolist())
            found.top_logprobs.extend((values - total).tolist())
        else:
            found.top_ids.extend([] for _ in range(len(logits)))
            found.top_logprobs.extend([] for _ in range(len(logits)))
    return found


def one_of(
    logprobs: TokenLogprobs, index: int, num_top: int, named: tuple[list[int], list[float]] | None = None
) -> TokenLogprobs:
    """Those of one token, with `num_top` of the most likely ones (all, if negative), or with `named` ones."""
    top = slice(None) if num_top < 0 else slice(num_top)
    top_ids, top_logprobs = named or (logprobs.top_ids[index][top], logprobs.top_logprobs[index][top])
    return TokenLogprobs(
        logprobs=[logprobs.logprobs[index]],
        ranks=[logprobs.ranks[index]],
        top_ids=[top_ids],
        top_logprobs=[top_logprobs],
    )
