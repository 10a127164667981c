"""What rows of a step give besides tokens, where their requests ask for it: log-probabilities and embeddings."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eventlm.worker.protocol import RowExtras
from eventlm.worker.sampling.logprobs import one_of, token_logprobs
from eventlm.worker.sampling.sampler import NOT_FINITE
from eventlm.worker.sequence_table import Row


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
) -> list[RowExtras]:
    """Of each row that asked for any.

    `hidden_TH` is what the forward pass gave for the step's tokens, `sampled_rows` the numbers of the rows of
    `logits_SV`, which may be None where none of those asked.
    """
    asking = [number for number, row in enumerate(rows) if row.sequence.wants_extras]
    if not asking:
        return []
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
    return [RowExtras(row=number, **fields) for number, fields in found.items() if fields]


def _add_logprobs(
    found: dict[int, dict[str, Any]], rows: Seq[Row], sampled_rows: list[int], logits_SV: Tensor, drawn: list[int]
) -> None:
    """Of the tokens just drawn, for all rows that asked at once."""
    wanted = [
        (place, count)
        for place, number in enumerate(sampled_rows)
        if (count := rows[number].sequence.params.logprobs) is not None and drawn[place] != NOT_FINITE
    ]
    if not wanted:
        return
    places, counts = [place for place, _ in wanted], [count for _, count in wanted]
    num_top = -1 if min(counts) < 0 else max(counts)
    drawn_ids = torch.tensor([drawn[place] for place in places], device=logits_SV.device)
    logprobs = token_logprobs(lambda span: logits_SV[places[span]], drawn_ids, logits_SV.shape[1], num_top)
    for place, (at, count) in enumerate(zip(places, counts, strict=True)):
        found[sampled_rows[at]]["logprobs"] = one_of(logprobs, place, count)


def _add_prompt_logprobs(fields: dict[str, Any], row: Row, forward: OutputLayer, own_TH: Tensor) -> None:
    """Of the prompt tokens that follow those of the row; the last one's follower is output, or in the next chunk."""
    sequence = row.sequence
    num_top = sequence.params.prompt_logprobs
    if num_top is None:
        if sequence.kind != "score":
            return
        num_top = 0
    start = row.start + 1
    end = min(start + row.num_tokens, sequence.num_prompt_tokens)
    if start >= end:
        return
    token_ids = torch.tensor(sequence.token_ids[start:end], device=own_TH.device)
    fields["prompt_start"] = start
    fields["prompt_logprobs"] = token_logprobs(
        lambda span: forward.logits(own_TH[span]), token_ids, forward.vocab_size, num_top
    )


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
