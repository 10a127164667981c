"""What a completed step means: tokens are confirmed or dropped, filled blocks become hittable, sequences end."""

from __future__ import annotations

from eventlm.core.replica import Replica, StepInFlight
from eventlm.core.sequence import FIRST_ENDED, Sequence, State
from eventlm.core.sequence_manager import end, enqueue
from eventlm.core.state import CoreState
from eventlm.errors import InvariantError
from eventlm.events import Emitted, StepCompleted
from eventlm.types import FinishReason, WorkerEnd

#: A sequence whose end was seen, and why.
_Ends = list[tuple[Sequence, FinishReason]]


def complete_step(state: CoreState, fact: StepCompleted) -> None:
    """Apply a completion. One of an older worker, or of one that is lost, is a no-op."""
    replica = state.replicas[fact.replica]
    if not replica.up or fact.epoch != replica.epoch:
        return
    step = replica.in_flight.popleft() if replica.in_flight else None
    if step is None or step.step != fact.step or len(fact.produced) != len(step.residencies):
        raise InvariantError(
            f"replica {fact.replica} completed step {fact.step} with {len(fact.produced)} rows, "
            f"but step {step and step.step} with {step and len(step.residencies)} rows was due"
        )
    reasons = dict(fact.ends)
    dropped: list[tuple[int, int]] = []
    ends: _Ends = []
    drained: list[Sequence] = []
    _confirm_decodes(step, fact.produced, reasons, dropped, ends, drained)
    _confirm_chunks(step, fact.produced, reasons, dropped, ends, drained)
    for row, names in fact.filled:
        _fill(replica, step, row, names)
    num_dropped = sum(count for _, count in dropped)
    state.decide(
        Emitted,
        replica=replica.index,
        step=step.step,
        num_tokens=sum(fact.produced) - num_dropped,
        dropped=dropped,
    )
    for sequence, reason in ends:
        end(state, sequence, reason)
    for sequence in drained:
        if sequence.state is State.WAITING:
            state.touch(sequence)
            if not sequence.in_flight:
                enqueue(state, sequence)


def _confirm_decodes(
    step: StepInFlight,
    produced: list[int],
    reasons: dict[int, WorkerEnd],
    dropped: list[tuple[int, int]],
    ends: _Ends,
    drained: list[Sequence],
) -> None:
    """Runs once for every sequence and step: written for speed. `zip` stops at the last decode."""
    waiting, first_ended = State.WAITING, FIRST_ENDED
    for row, (sequence, count, most) in enumerate(zip(step.decodes, produced, step.most, strict=False)):
        sequence.in_flight -= 1
        sequence.sampling_in_flight -= 1
        sequence.pending -= most
        if sequence.state >= first_ended:
            if count:
                dropped.append((row, count))
        else:
            if count:
                sequence.total = total = sequence.total + count
                if sequence.evictions:
                    sequence.evictions = 0
                if total >= sequence.limit and row not in reasons:
                    ends.append((sequence, "length"))
            if sequence.state is waiting:
                drained.append(sequence)
            if reasons and row in reasons:
                ends.append((sequence, reasons[row]))


def _confirm_chunks(
    step: StepInFlight,
    produced: list[int],
    reasons: dict[int, WorkerEnd],
    dropped: list[tuple[int, int]],
    ends: _Ends,
    drained: list[Sequence],
) -> None:
    for row, chunk in enumerate(step.chunks, start=len(step.decodes)):
        sequence, count, most = chunk.sequence, produced[row], step.most[row]
        sequence.in_flight -= 1
        if most:
            sequence.sampling_in_flight -= 1
            sequence.pending -= most
        if sequence.state >= FIRST_ENDED:
            if count:
                dropped.append((row, count))
            continue
        sequence.total += count
        if count:
            sequence.evictions = 0
        if row in reasons:
            ends.append((sequence, reasons[row]))
        elif chunk.final and sequence.arrival.kind != "generate":
            ends.append((sequence, "complete"))
        elif count and sequence.total >= sequence.limit:
            ends.append((sequence, "length"))
        if sequence.state is State.WAITING:
            drained.append(sequence)


def _fill(replica: Replica, step: StepInFlight, row: int, names: list[int]) -> None:
    """Blocks of a sequence that the step's KV completed have names now, and are hittable if it held them since."""
    num_decodes = len(step.decodes)
    sequence = step.decodes[row] if row < num_decodes else step.chunks[row - num_decodes].sequence
    if sequence.state >= FIRST_ENDED:
        return
    sequence.names += names
    if sequence.resident and sequence.residency == step.residencies[row]:
        replica.publish(sequence, len(sequence.names))
