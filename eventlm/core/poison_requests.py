"""Poison requests: which sequence kills every worker that computes it, and must end so that the others can go on.

1. A lost worker makes suspects of the sequences in the step that it had in hand, for the tokens that were in flight.
   Where that is not known, it is the oldest one that is not answered: its answer may have been lost with the worker, so
   nothing later is suspected.
2. A suspect is computed in steps of its own, with nothing else in flight on its replica, before anybody else runs
   there. Once one reaches the suspected tokens, the suspect is cleared. If the worker is lost in one, the suspect
   goes to the end of the line. After each loss all suspects are held back until a step has completed, if anything
   else can run: so the others make progress between the losses, and the replica is not given up for them.
3. It ends with `error` once chance is ruled out. Workers may be lost for other reasons, at a rate that the run itself
   shows: losses that do not involve the suspect, against completed steps. The suspect is condemned when that rate
   makes its own losses in a row less likely than 1 to `ODDS`, not counting the first, which had to hit some step.
4. Where no step completes any more between the losses, there is no such rate. Then it is condemned after `max_losses`
   losses in a row, all its own. If others are among them, the workers are at fault, and no sequence is condemned.

A loss counts twice if the worker crashed of itself, because nothing outside it can have been the reason.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from eventlm.core.admission import measure
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica, StepInFlight
from eventlm.core.state.replicaset import LossCounts, Replicaset, Suspect
from eventlm.core.state.sequence import Sequence
from eventlm.types import SequenceId

#: How unlikely losses by chance must be.
ODDS = 100_000
#: Counts are halved at so many steps, so that they say how often workers have been lost lately.
MAX_STEPS_COUNTED = 1 << 17


def accuse(state: CoreState, replica: Replica, *, crashed: bool, step: int = -1) -> list[Sequence]:
    """Count the loss of a worker against the rows of one of its steps in flight; nothing if it has none. Returns the
    sequences that must end, in order of their rows.

    step: the one that the worker had in hand; where it is not in flight, the oldest.
    """
    if not replica.in_flight:
        return []
    weight = 2 if crashed else 1
    replicaset = state.set_of(replica)
    losses = replicaset.losses
    losses.num_losses += weight
    losses.in_a_row += weight
    if not replica.config.max_losses:
        return []
    alone = len({row.sequence.id for step in replica.in_flight for row in _rows(step)}) == 1
    condemned = []
    for sequence, start, end in _rows_in_hand(replica, step):
        if sequence.ended:
            continue
        end = max(end, sequence.launched_tokens)
        suspect = Suspect(weight, weight * alone, start, end)
        before = replicaset.suspects.get(sequence.id)
        if before is not None and max(start, before.start) < min(end, before.end):
            suspect = Suspect(
                before.losses + weight,
                before.losses_alone + weight * alone,
                max(start, before.start),
                min(end, before.end),
            )
            if alone and _is_beyond_doubt(losses, suspect, replica.config.max_losses):
                condemned.append(sequence)
                # These losses are explained: they say nothing about the workers.
                losses.num_losses -= suspect.losses
                losses.in_a_row = 0
        if alone:
            replicaset.suspects.pop(sequence.id, None)
        replicaset.suspects[sequence.id] = suspect
    return condemned


def _is_beyond_doubt(counts: LossCounts, suspect: Suspect, max_losses: int) -> bool:
    others = max(counts.num_losses - suspect.losses, 0) + 1
    repeated = suspect.losses_alone - 1
    if repeated > 0 and (counts.num_steps + others) ** repeated >= ODDS * others**repeated:
        return True
    return min(suspect.losses, counts.in_a_row) >= max_losses


def note_step(replicaset: Replicaset, step: StepInFlight) -> None:
    """A step has completed. Its rows did no harm."""
    counts = replicaset.losses
    counts.num_steps += 1
    counts.in_a_row = 0
    if counts.num_steps >= MAX_STEPS_COUNTED:
        counts.num_steps //= 2
        counts.num_losses //= 2
    if replicaset.suspects:
        for sequence, _, end in _rows(step):
            suspect = replicaset.suspects.get(sequence.id)
            if suspect is not None and end >= suspect.end:
                replicaset.clear_suspect(sequence.id)


class _Row(NamedTuple):
    """A row of a step in flight, and the tokens that it computes, from `start` to before `end`."""

    sequence: Sequence
    start: int
    end: int


def _rows(step: StepInFlight) -> list[_Row]:
    decodes = [_Row(sequence, sequence.num_tokens - 1, sequence.num_tokens) for sequence in step.decodes]
    return decodes + [_Row(*row[:3]) for row in step.chunks]


def _rows_in_hand(replica: Replica, number: int) -> list[_Row]:
    """The rows of the step in flight with this number, else of the oldest. A decode that follows
    others of its sequence is for a token after all that those may produce.
    """
    ahead: Counter[SequenceId] = Counter()
    for step in replica.in_flight:
        if step.step == number:
            num_decodes = len(step.decodes)
            rows = _rows(step)
            decodes = [row._replace(end=row.end + ahead[row.sequence.id]) for row in rows[:num_decodes]]
            return decodes + rows[num_decodes:]
        sequences = [*step.decodes, *(row.sequence for row in step.chunks)]
        for sequence, most in zip(sequences, step.most, strict=True):
            ahead[sequence.id] += most
    return _rows(replica.in_flight[0])


def is_suspect(state: CoreState, sequence: Sequence) -> bool:
    """Whether a sequence may only be computed in a step of its own."""
    return sequence.id in state.set_of(sequence).suspects


def is_held_back(state: CoreState, sequence: Sequence) -> bool:
    """Whether a sequence is only computed where nothing else can run: no step has completed since the latest loss."""
    replicaset = state.set_of(sequence)
    return replicaset.losses.in_a_row > 0 and sequence.id in replicaset.suspects


def find_trial(state: CoreState, replica: Replica, *, held_back: bool = False) -> Sequence | None:
    """The suspect that a replica has to try alone now: one that is resident, else the first that waits and fits.

    held_back: whether it may be one of those that are held back.
    """
    waiting = None
    for request, index in state.set_of(replica).suspects:
        sequence = state.requests[request].sequences[index]
        if sequence.resident and sequence.replica == replica.index:
            return sequence
        if not held_back and is_held_back(state, sequence):
            continue
        if waiting is None and sequence.ticket and sequence.home in (-1, replica.index):
            has_slot = len(replica.running) < replica.config.max_residents
            waiting = sequence if has_slot and measure(replica, sequence).num_lacking <= 0 else None
    return waiting
