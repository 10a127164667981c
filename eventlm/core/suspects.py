"""Sequences that may have killed their worker: who is suspected, who is tried alone, who is given up.

A request can kill every worker that computes it. It must not go on for ever, and who was beside it must not pay:

1. Suspected are the sequences of the oldest step that a lost worker had not answered, for those of their known tokens
   that were in flight: the answer to that step may have been lost with the worker.
2. The cause would be one of the tokens that were in flight each time. A loss elsewhere starts a new count, and a
   suspect is cleared by the completion of a row that reaches as far as those tokens.
3. A suspect with half of `max_losses` is tried alone, in a step of its own with nothing else in flight on its replica.
4. Lost `max_losses` times in a row by the same tokens, a sequence ends with `error`.

So nobody ends for another's fault, nor for a worker that dies of itself now and then. But workers that somebody kills
again and again, faster than they get anything done, look the same from here: hence the default of `max_losses` is 0,
never.
"""

from __future__ import annotations

from typing import NamedTuple

from eventlm.core.replica import Replica, StepInFlight
from eventlm.core.residency import measure
from eventlm.core.sequence import Sequence
from eventlm.core.state import CoreState, Suspect


def accuse(state: CoreState, step: StepInFlight) -> list[Sequence]:
    """Count a loss against the rows of a step; those that must end, in order of their rows."""
    if not state.config.max_losses:
        return []
    guilty = []
    for sequence, start, end in _rows(step):
        if sequence.ended:
            continue
        end = max(end, sequence.launched_tokens)
        before = state.suspects.get(sequence.id, Suspect(0, start, end))
        common = max(start, before.start), min(end, before.end)
        suspect = Suspect(before.losses + 1, *common) if common[0] < common[1] else Suspect(1, start, end)
        state.suspects[sequence.id] = suspect
        if suspect.losses >= state.config.max_losses:
            guilty.append(sequence)
    return guilty


def clear(state: CoreState, step: StepInFlight) -> None:
    """A step has completed: its rows did no harm."""
    for sequence, _, end in _rows(step):
        suspect = state.suspects.get(sequence.id)
        if suspect is not None and end >= suspect.end:
            del state.suspects[sequence.id]


class _Row(NamedTuple):
    """A row of the oldest step in flight, and the tokens that it computes, from `start` to before `end`."""

    sequence: Sequence
    start: int
    end: int


def _rows(step: StepInFlight) -> list[_Row]:
    decodes = [_Row(sequence, sequence.num_tokens - 1, sequence.num_tokens) for sequence in step.decodes]
    return decodes + [_Row(*row[:3]) for row in step.chunks]


def is_tried_alone(state: CoreState, sequence: Sequence) -> bool:
    """Whether a sequence may only be computed in a step of its own."""
    suspect = state.suspects.get(sequence.id)
    return suspect is not None and suspect.losses * 2 >= state.config.max_losses


def find_trial(state: CoreState, replica: Replica) -> Sequence | None:
    """The suspect that a replica has to try alone now: one that is resident, else the first that waits and fits."""
    waiting = None
    for request, index in state.suspects:
        sequence = state.requests[request].sequences[index]
        if not is_tried_alone(state, sequence):
            continue
        if sequence.resident and sequence.replica == replica.index:
            return sequence
        if waiting is None and sequence.ticket and sequence.home in (-1, replica.index):
            has_slot = len(replica.running) < state.config.max_num_seqs
            waiting = sequence if has_slot and measure(state, replica, sequence).num_lacking <= 0 else None
    return waiting
