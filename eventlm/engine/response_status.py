"""Where the sequences of a reply are at the moment, and what the log says of those that have ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from eventlm.core.sequence import State
from eventlm.core.state import CoreState
from eventlm.metrics.ended_rows import EndedRows
from eventlm.metrics.rows import RequestRow
from eventlm.types import SequenceId

#: preempted: it waits again. ending: its end was seen, its text has yet to be looked at.
SampleState = Literal["waiting", "running", "preempted", "ending", "finished"]
_STATES: dict[State, SampleState] = {
    State.WAITING_FOR_GRAMMAR: "waiting",
    State.WAITING: "waiting",
    State.PREFILL: "running",
    State.DECODE: "running",
    State.CLOSING: "ending",
    State.FINISHED: "finished",
}


class SampleStatus(Struct, frozen=True, kw_only=True):
    """A sequence of a reply. row: of one that has ended, None also where that is too long ago."""

    request: int
    index: int
    state: SampleState
    output_tokens: int
    row: RequestRow | None = None


class ReplyStatus(Struct, frozen=True, kw_only=True):
    """A reply's sequences, in the order of its choices."""

    reply_id: str
    samples: list[SampleStatus]


def reply_status(
    reply_id: str, requests: Sequence[tuple[int, int]], state: CoreState | None, rows: EndedRows
) -> ReplyStatus:
    """`requests` are (seq, n). `state` None: the engine does not run any more."""
    samples = [sample for seq, n in requests for sample in _samples(seq, n, state, rows)]
    return ReplyStatus(reply_id=reply_id, samples=samples)


def _samples(seq: int, n: int, state: CoreState | None, rows: EndedRows) -> Iterator[SampleStatus]:
    live = state.requests.get(seq) if state is not None else None
    for index in range(n):
        row = rows.find(SequenceId(seq, index))
        found: SampleState = "finished"
        output_tokens = row.output_tokens if row is not None else 0
        if live is not None and row is None:
            sequence = live.sequences[index]
            found, output_tokens = _STATES[sequence.state], sequence.num_output_tokens
            if found == "waiting" and sequence.residency:
                found = "preempted"
        yield SampleStatus(request=seq, index=index, state=found, output_tokens=output_tokens, row=row)
