"""Why a sequence is in no step after a drain: its state, every constraint, its place in line, who holds the blocks.

The verdict is `find_wait_reason`, as in an explanation; the rest says what there is to know around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from msgspec import Struct

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.plan_witness import PlanEntry
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.step_plan import StepPlan, WaitCause, WaitReason
from eventlm.core.wait_reason import takers_of
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.why.constraints import Constraint, Inquiry, find_constraints, live
from eventlm.replay.why.holders import PoolUse, find_pool_use
from eventlm.replay.why.place import PlaceInLine, find_place
from eventlm.types import SequenceId


class Why(Struct, frozen=True, kw_only=True):
    """A live sequence after the drain that ended before event `next_s`.

    cause: why it is in no step, None if it is in one. replica: the one that the cause is about, -1 for the engine;
    num_lacking, other: as of `WaitReason`. steps: those in flight with a row of it.
    num_tokens: prompt and confirmed output. launched_tokens: of the prefill_tokens of its present prompt phase.
    pool: of the replica that the cause, or the sequence, is on; None if there is no such, or it is another server.
    is_forwarded: its replicas are other servers; it is in no step there, but one of them may have it.
    """

    request: int
    index: int
    n: int
    next_s: int
    now_ns: int
    state: str
    prompt_tokens: int
    num_tokens: int
    max_total_tokens: int
    prefill_tokens: int
    launched_tokens: int
    num_blocks: int
    num_preemptions: int
    steps: list[int]
    cause: WaitCause | None
    replica: int
    num_lacking: int
    other: SequenceId | None
    constraints: list[Constraint]
    place: PlaceInLine | None
    pool: PoolUse | None
    is_forwarded: bool = False


def why(
    state: CoreState,
    request: int,
    index: int,
    reason: WaitReason | None,
    plans: Mapping[int, StepPlan],
    witness: Seq[PlanEntry] = (),
) -> Why:
    """Why a live sequence is in no step now. Changes nothing that decides.

    reason, plans: of a `WaitWatch` that has followed the sequence up to this drain. witness: what the latest plans
    looked at. Raises UsageError if the sequence is not live.
    """
    sequence = live_sequence(state, request, index)
    inquiry = Inquiry(state, sequence, reason, plans, witness)
    replica = _replica_in_question(state, sequence, reason)
    on = replica.index if replica is not None else -1
    is_forwarded = state.set_of(sequence).forwards is not None
    return Why(
        request=request,
        index=index,
        n=sequence.arrival.n,
        next_s=state.next_seq,
        now_ns=state.now_ns,
        state=sequence.state.name.lower(),
        prompt_tokens=sequence.prompt_tokens,
        num_tokens=sequence.num_tokens,
        max_total_tokens=sequence.max_total_tokens,
        prefill_tokens=sequence.prefill_tokens,
        launched_tokens=sequence.launched_tokens,
        num_blocks=0 if is_forwarded else len(sequence.block_table),
        num_preemptions=0 if is_forwarded or sequence.ended else sequence.residency - int(sequence.resident),
        steps=_steps_with(state, sequence),
        cause=None if reason is None else reason.cause,
        replica=on if reason is None else reason.replica,
        num_lacking=0 if reason is None else reason.num_lacking,
        other=None if reason is None else reason.other,
        constraints=find_constraints(inquiry),
        place=None if is_forwarded and sequence.resident else find_place(state, sequence, replica),
        pool=None if replica is None or sequence.ended or is_forwarded else find_pool_use(replica),
        is_forwarded=is_forwarded,
    )


def live_sequence(state: CoreState, request: int, index: int) -> Sequence:
    """A sequence that has arrived and not ended. Raises UsageError that says which of both it is."""
    if request >= state.next_seq:
        raise UsageError(f"request {request} has not arrived: the next event is {state.next_seq}")
    found = state.requests.get(request)
    if found is None:
        raise UsageError(f"request {request} is not live here: it has ended, was rejected, or never was")
    if not 0 <= index < found.arrival.n:
        raise UsageError(f"request {request} has no sample {index}, it has {counted(found.arrival.n, 'sample')}")
    sequence = live(state, (request, index))
    if sequence is None:
        raise UsageError(f"sequence {request}.{index} has ended, other samples of request {request} have not")
    return sequence


def _replica_in_question(state: CoreState, sequence: Sequence, reason: WaitReason | None) -> Replica | None:
    """That of the cause; else its own, or the only one that could take it."""
    if reason is not None and reason.replica >= 0:
        return state.replicas[reason.replica]
    takers = takers_of(state, sequence)
    return takers[0] if len(takers) == 1 else None


def _steps_with(state: CoreState, sequence: Sequence) -> list[int]:
    """Steps in flight with a row of the sequence. Those of a preempted one are on the replica that it was on."""
    return [
        step.step
        for replica in state.replicas
        for step in replica.in_flight
        if any(each is sequence for each in step.decodes) or any(row.sequence is sequence for row in step.chunks)
    ]
