"""What a completed step means: tokens are confirmed or dropped, filled blocks become hittable, sequences end."""

from __future__ import annotations

from itertools import count as count_up
from operator import le

from msgspec import Struct

from eventlm.core.poison_requests import note_step
from eventlm.core.sequence_manager import end, enqueue
from eventlm.core.state.core_state import CoreState, replica_of
from eventlm.core.state.replica import Replica, StepInFlight
from eventlm.core.state.sequence import Sequence, State
from eventlm.errors import InvariantError
from eventlm.events import Emitted, StepCompleted
from eventlm.types import FinishReason, WorkerEnd


class Outcome(Struct, eq=False):
    """What a step's rows led to: (row, tokens) dropped, sequences whose end was seen, preempted ones that drained."""

    dropped: list[tuple[int, int]] = []
    ends: list[tuple[Sequence, FinishReason]] = []
    drained: list[Sequence] = []


def complete_step(state: CoreState, fact: StepCompleted) -> None:
    """Apply a completion. One of an older worker, or of one that is lost, is a no-op."""
    replica = replica_of(state, fact.replica)
    if fact.epoch != replica.worker:
        return
    step = replica.in_flight[0] if replica.in_flight else None
    if step is None or step.step != fact.step or step.launch_seq != fact.c:
        raise InvariantError(f"replica {fact.replica} completed step {fact.step}, but {step and step.step} was due")
    _check_rows(step, fact)
    note_step(state.set_of(replica), step)
    replica.complete()
    reasons = dict(fact.ends)
    outcome = Outcome()
    _confirm_decodes(step, fact.produced, reasons, outcome)
    if step.chunks:
        _confirm_chunks(step, fact.produced, reasons, outcome)
    for row, names in fact.filled:
        _fill(replica, step, row, names)
    num_tokens = sum(fact.produced)
    if outcome.dropped:
        num_tokens -= sum(count for _, count in outcome.dropped)
    state.note(
        Emitted(
            s=state.next_seq,
            ts=state.now_ns,
            c=state.cause,
            replica=replica.index,
            step=step.step,
            num_tokens=num_tokens,
            dropped=outcome.dropped,
        )
    )
    for sequence, reason in outcome.ends:
        end(state, sequence, reason)
    for sequence in outcome.drained:
        if sequence.state is State.WAITING:
            state.touch(sequence)
            if not sequence.in_flight:
                enqueue(state, sequence)


def _check_rows(step: StepInFlight, fact: StepCompleted) -> None:
    """Raises InvariantError unless every row produced between none and the most it was launched for."""
    produced, most = fact.produced, step.most
    # Nearly always every row produced the most.
    fits = produced == most or (len(produced) == len(most) and min(produced) >= 0 and all(map(le, produced, most)))
    # A row that computes part of a prompt ends only by an error.
    if not fits or (
        fact.ends and any(not 0 <= row < len(most) or not (most[row] or end == "error") for row, end in fact.ends)
    ):
        raise InvariantError(f"step {fact.step} of replica {fact.replica} produced what it was not launched for")
    if fact.filled and any(not 0 <= row < len(most) for row, _ in fact.filled):
        raise InvariantError(f"step {fact.step} of replica {fact.replica} filled blocks of rows it does not have")


def _confirm_decodes(
    step: StepInFlight,
    produced: list[int],
    reasons: dict[int, WorkerEnd],
    outcome: Outcome,
) -> None:
    """Runs once for every sequence and step: written for speed. `zip` stops at the last decode."""
    dropped, ends, drained = outcome.dropped, outcome.ends, outcome.drained
    decode_state = State.DECODE
    for row, sequence, count, most in zip(count_up(), step.decodes, produced, step.most, strict=False):
        sequence.in_flight -= 1
        sequence.sampling_in_flight -= 1
        sequence.pending_tokens -= most
        if sequence.state is not decode_state:
            if sequence.ended:
                if count:
                    dropped.append((row, count))
                continue
            drained.append(sequence)
        if count:
            sequence.num_tokens = total = sequence.num_tokens + count
            if sequence.evictions:
                sequence.evictions = 0
            if total >= sequence.max_total_tokens and row not in reasons:
                ends.append((sequence, "length"))
        if reasons and row in reasons:
            ends.append((sequence, reasons[row]))


def _confirm_chunks(
    step: StepInFlight,
    produced: list[int],
    reasons: dict[int, WorkerEnd],
    outcome: Outcome,
) -> None:
    dropped, ends, drained = outcome.dropped, outcome.ends, outcome.drained
    for row, chunk in enumerate(step.chunks, start=len(step.decodes)):
        sequence, count, most = chunk.sequence, produced[row], step.most[row]
        sequence.in_flight -= 1
        if most:
            sequence.sampling_in_flight -= 1
            sequence.pending_tokens -= most
        if sequence.ended:
            if count:
                dropped.append((row, count))
            continue
        sequence.num_tokens += count
        if count:
            sequence.evictions = 0
        if row in reasons:
            ends.append((sequence, reasons[row]))
        elif chunk.final and sequence.arrival.scheduling.kind != "generate":
            ends.append((sequence, "complete"))
        elif count and sequence.num_tokens >= sequence.max_total_tokens:
            ends.append((sequence, "length"))
        if sequence.state is State.WAITING:
            drained.append(sequence)


def _fill(replica: Replica, step: StepInFlight, row: int, names: list[int]) -> None:
    """Blocks of a sequence that the step's KV completed have names now, and are hittable if it held them since.

    Raises InvariantError if it has not as many full blocks.
    """
    num_decodes = len(step.decodes)
    sequence = step.decodes[row] if row < num_decodes else step.chunks[row - num_decodes].sequence
    if sequence.ended:
        return
    sequence.block_names += names
    if sequence.state is State.PREFILL:
        replica.await_names(names)
    if len(sequence.block_names) * replica.config.block_size > sequence.num_tokens:
        raise InvariantError(f"step {step.step} of replica {replica.index} filled more blocks than {sequence} has")
    # A preempted sequence is not admitted again while a row of it is in flight: resident now is resident since.
    if sequence.resident:
        replica.publish(sequence, len(sequence.block_names))
        if replica.states is not None:
            replica.states.fulfil(sequence.id, sequence.block_names, replica.pool.tree)
