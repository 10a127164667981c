"""What a sequence needs to be in a step, each with its value, its limit and whether it is met.

A plan asks in this order, and need not come to the end of it. Each verdict is that of the latest plan that counts, or
of the state after the drain where no plan is needed to know it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

from msgspec import Struct

from eventlm.core.admission import measure
from eventlm.core.poison_requests import is_held_back
from eventlm.core.state.backend_state import Attempts, Forwards
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.plan_witness import ChunkAsked, PlanEntry
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.step_plan import StepPlan, WaitCause, WaitReason
from eventlm.core.wait_reason import takers_of
from eventlm.formatting import counted
from eventlm.types import NANOSECONDS_PER_MILLISECOND, ceil_div

#: A cause, or something that is counted towards one.
ConstraintName = WaitCause | Literal["rows_in_flight", "state_slots", "skips"]
#: `unasked`: the plan did not come to it, or there was none.
ConstraintVerdict = Literal["met", "stops", "unasked"]


class Constraint(Struct, frozen=True, kw_only=True):
    """One thing that a sequence needs to be in a step.

    replica: -1 for what concerns the whole engine. value, limit: what is compared; None where nothing is counted.
    detail: the comparison in words. decides: it is the reason that `find_wait_reason` gives.
    """

    name: ConstraintName
    verdict: ConstraintVerdict
    replica: int = -1
    value: int | None = None
    limit: int | None = None
    detail: str = ""
    decides: bool = False


class Inquiry(Struct, frozen=True):
    """Of which sequence, after which drain, with what is known of its plans.

    plans: by replica, the latest since it has been waiting, or resident without a row. witness: of the latest plans.
    """

    state: CoreState
    sequence: Sequence
    reason: WaitReason | None
    plans: Mapping[int, StepPlan]
    witness: Seq[PlanEntry]


def find_constraints(inquiry: Inquiry) -> list[Constraint]:
    """First those of the whole engine, then those of each replica that could take the sequence."""
    found = list(_of_engine(inquiry))
    is_forwarded = inquiry.state.set_of(inquiry.sequence).forwards is not None
    for replica in takers_of(inquiry.state, inquiry.sequence):
        found += [_of_backend(inquiry, replica)] if is_forwarded else _of_replica(inquiry, replica)
    return found


def _is(inquiry: Inquiry, cause: WaitCause, replica: int = -1) -> bool:
    return inquiry.reason is not None and (inquiry.reason.cause, inquiry.reason.replica) == (cause, replica)


def _of_engine(inquiry: Inquiry) -> Iterator[Constraint]:
    state, sequence = inquiry.state, inquiry.sequence
    if sequence.state is State.WAITING_FOR_GRAMMAR:
        yield Constraint(name="grammar", verdict="stops", detail="it is not built yet", decides=True)
    elif sequence.arrival.scheduling.waits_for_grammar:
        yield Constraint(name="grammar", verdict="met", detail="it is built")
    if sequence.state is State.CLOSING:
        yield Constraint(
            name="text_end", verdict="stops", detail=f"it has ended with `{sequence.closing_reason}`", decides=True
        )
    drains = sequence.state is State.WAITING and sequence.in_flight > 0
    is_forwarded = state.set_of(sequence).forwards is not None
    if not is_forwarded and (drains or sequence.residency > int(sequence.resident)):
        yield Constraint(
            name="draining",
            verdict="stops" if drains else "met",
            value=sequence.in_flight if drains else 0,
            limit=0,
            detail=f"{counted(sequence.in_flight, 'row') if drains else 'no row'} from before its preemption in flight",
            decides=drains,
        )
    yield Constraint(
        name="paused",
        verdict="stops" if state.paused else "met",
        detail=f"the engine is{'' if state.paused else ' not'} paused",
        decides=_is(inquiry, "paused"),
    )
    forwards = state.set_of(sequence).forwards
    if forwards is not None:
        yield _backoff(inquiry, forwards)
    if _is(inquiry, "backend"):
        yield Constraint(name="backend", verdict="stops", detail="none that could take it is up", decides=True)
    if _is(inquiry, "worker"):
        replicas = state.set_of(sequence).replicas
        num_up = sum(replica.up for replica in replicas)
        detail = f"{num_up} of {counted(len(replicas), 'worker')} up"
        yield Constraint(name="worker", verdict="stops", value=num_up, limit=len(replicas), detail=detail, decides=True)


def _backoff(inquiry: Inquiry, forwards: Forwards) -> Constraint:
    attempts = forwards.attempts.get(inquiry.sequence.id, Attempts())
    rests = inquiry.sequence.id in forwards.resting
    detail = f"{counted(attempts.number, 'attempt')} so far"
    if rests:
        left_ms = (attempts.due_ns - inquiry.state.now_ns) / NANOSECONDS_PER_MILLISECOND
        detail += f", the next is due in {left_ms:,.1f} ms"
    return Constraint(
        name="backoff",
        verdict="stops" if rests else "met",
        value=attempts.number,
        limit=forwards.config.max_attempts,
        detail=detail,
        decides=_is(inquiry, "backoff"),
    )


def _of_backend(inquiry: Inquiry, replica: Replica) -> Constraint:
    """Of a replica that is another server only its load is known."""
    if not replica.up or replica.capacity is None:
        return Constraint(name="backend", verdict="stops", replica=replica.index, detail="it is not up")
    limit = replica.capacity.limit
    detail = f"it has {replica.num_sent:,} of at most {counted(limit, 'request')}"
    if _is(inquiry, "avoided", replica.index):
        detail += ", but the latest attempt has failed there"
        return Constraint(name="avoided", verdict="stops", replica=replica.index, detail=detail, decides=True)
    return Constraint(
        name="backend_limit",
        verdict="met" if replica.has_room() or inquiry.sequence.resident else "stops",
        replica=replica.index,
        value=replica.num_sent,
        limit=limit,
        detail=detail,
        decides=_is(inquiry, "backend_limit", replica.index),
    )


def _of_replica(inquiry: Inquiry, replica: Replica) -> Iterator[Constraint]:
    if not replica.up:
        yield Constraint(name="worker", verdict="stops", replica=replica.index, detail="its worker is not up")
        return
    sequence, plan = inquiry.sequence, inquiry.plans.get(replica.index)
    yield Constraint(name="worker", verdict="met", replica=replica.index, detail=f"worker {replica.epoch} is up")
    if sequence.ended:
        return
    left_out = None if plan is None else plan.wait_reason(sequence)
    yield _steps_in_flight(inquiry, replica, plan)
    if sequence.state is State.DECODE:
        yield _rows_in_flight(inquiry, replica)
    yield _trial(inquiry, replica, left_out)
    if not sequence.resident:
        yield _head_of_line(inquiry, replica, plan, left_out)
        yield _sequence_limit(inquiry, replica)
    if replica.config.stages > 1:
        yield _rows_of_step(inquiry, replica, plan, left_out)
    yield _blocks(inquiry, replica, left_out)
    if replica.states is not None:
        yield Constraint(
            name="state_slots",
            verdict="met",
            replica=replica.index,
            value=len(replica.running),
            limit=replica.states.num_slots,
            detail=f"every resident has one, and {replica.states.num_copies:,} hold copies for later prompts",
        )
    yield _token_budget(inquiry, replica, plan, left_out)
    if sequence.state is not State.DECODE:
        yield _batcher(inquiry, replica)
    if not sequence.resident:
        yield _skips(inquiry, replica)


def _steps_in_flight(inquiry: Inquiry, replica: Replica, plan: StepPlan | None) -> Constraint:
    """No step is planned where the pipeline is full. Once a plan has looked at the sequence, that is not the reason."""
    config = replica.config
    num_steps = len(replica.in_flight)
    detail = f"{num_steps} of at most {config.steps_in_flight} in flight"
    if num_steps < config.steps_in_flight and not replica.has_room():
        predicted_ms = replica.in_flight[-1].predicted_ns / NANOSECONDS_PER_MILLISECOND
        detail += f", and none is planned after one predicted to take {predicted_ms:,.1f} ms (run_ahead_ms)"
    decides = _is(inquiry, "steps_in_flight", replica.index)
    if decides and plan is not None:
        detail += f"; the plan {_of_step(plan)} had looked at the line before it was there"
    elif plan is not None and not replica.has_room():
        detail += f"; the plan {_of_step(plan)} could have taken it"
    stops = plan is None and not replica.has_room() and not inquiry.sequence.in_flight
    return Constraint(
        name="steps_in_flight",
        verdict="stops" if stops or decides else "met",
        replica=replica.index,
        value=num_steps,
        limit=config.steps_in_flight,
        detail=detail,
        decides=decides,
    )


def _of_step(plan: StepPlan) -> str:
    return "that launched nothing" if plan.step < 0 else f"of step {plan.step}"


def _rows_in_flight(inquiry: Inquiry, replica: Replica) -> Constraint:
    num_rows, most = inquiry.sequence.sampling_in_flight, replica.config.decodes_in_flight_per_seq
    return Constraint(
        name="rows_in_flight",
        verdict="met" if num_rows < most else "stops",
        replica=replica.index,
        value=num_rows,
        limit=most,
        detail=f"{num_rows} of its own rows of at most {most} in flight",
    )


def _trial(inquiry: Inquiry, replica: Replica, left_out: WaitReason | None) -> Constraint:
    state, sequence = inquiry.state, inquiry.sequence
    suspects = state.set_of(sequence).suspects
    stops = left_out is not None and left_out.cause == "trial"
    if sequence.id in suspects:
        suspect = suspects[sequence.id]
        when = "once nothing else can run" if is_held_back(state, sequence) else "with nothing else in flight"
        detail = f"workers were lost while they computed it ({suspect.losses} counted): it is tried alone, {when}"
    elif stops and left_out is not None and left_out.other is not None:
        detail = f"{named(left_out.other)} is tried alone, because workers were lost while they computed it"
    elif suspects:
        detail = f"{counted(len(suspects), 'sequence')} to be tried alone, none of them now"
    else:
        detail = "no sequence is to be tried alone"
    return Constraint(
        name="trial",
        verdict="stops" if stops else "met",
        replica=replica.index,
        value=len(suspects),
        limit=0,
        detail=detail,
        decides=_is(inquiry, "trial", replica.index),
    )


def _head_of_line(inquiry: Inquiry, replica: Replica, plan: StepPlan | None, left_out: WaitReason | None) -> Constraint:
    limit = replica.config.max_skips
    closer = (
        plan.rest.other if plan is not None and plan.rest is not None and plan.rest.cause == "head_of_line" else None
    )
    if closer is None:
        verdict: ConstraintVerdict = "unasked" if plan is None else "met"
        return Constraint(
            name="head_of_line",
            verdict=verdict,
            replica=replica.index,
            limit=limit,
            detail="the line is open",
        )
    other = live(inquiry.state, closer)
    skips = None if other is None else other.skips
    stops = left_out is not None and left_out.cause == "head_of_line"
    who = "it" if closer == inquiry.sequence.id else named(closer)
    return Constraint(
        name="head_of_line",
        verdict="stops" if stops else "met",
        replica=replica.index,
        value=skips,
        limit=limit,
        detail=f"{who} closes the line: it does not fit and may not be passed over again",
        decides=_is(inquiry, "head_of_line", replica.index),
    )


def _rows_of_step(inquiry: Inquiry, replica: Replica, plan: StepPlan | None, left_out: WaitReason | None) -> Constraint:
    """What a step of a pipeline leaves to the other steps: of the decodes all but a share, or all if each share has a
    step; of the rest what would give it too many rows.
    """
    config = replica.config
    if inquiry.sequence.state is State.DECODE:
        value = 0 if plan is None else len(plan.decodes)
        limit = ceil_div(len(replica.running) - replica.num_partial, config.decode_batches)
        detail = f"a step takes {limit:,} of {counted(len(replica.running) - replica.num_partial, 'decode')}"
    else:
        value, limit = 0 if plan is None else len(plan.most), config.max_num_seqs
        detail = f"a step has at most {counted(limit, 'row')}"
    if plan is not None:
        detail += f"; the plan {_of_step(plan)} has {value:,}"
    stops = left_out is not None and left_out.cause == "micro_batch"
    if stops and not value:
        limit, detail = 0, f"in flight: {counted(config.decode_batches, 'step')} with decodes, one for each share"
    return Constraint(
        name="micro_batch",
        verdict="stops" if stops else "unasked" if plan is None else "met",
        replica=replica.index,
        value=value,
        limit=limit,
        detail=detail,
        decides=_is(inquiry, "micro_batch", replica.index),
    )


def _sequence_limit(inquiry: Inquiry, replica: Replica) -> Constraint:
    value, limit = len(replica.running), replica.config.max_residents
    decides = _is(inquiry, "sequence_limit", replica.index)
    before = ", and there was no slot when the plan was made" if decides and value < limit else ""
    return Constraint(
        name="sequence_limit",
        verdict="stops" if value >= limit or decides else "met",
        replica=replica.index,
        value=value,
        limit=limit,
        detail=f"{value:,} of at most {limit:,} sequences are resident{before}",
        decides=decides,
    )


def _blocks(inquiry: Inquiry, replica: Replica, left_out: WaitReason | None) -> Constraint:
    """value: blocks that it has to allocate; limit: blocks that it can get."""
    sequence, pool = inquiry.sequence, replica.pool
    block_size = replica.config.block_size
    if sequence.resident:
        ahead = sequence.num_tokens + sequence.pending_tokens
        held = len(sequence.block_table)
        value = 0 if sequence.state is State.PREFILL else max(ceil_div(ahead, block_size) - held, 0)
        limit = pool.num_available
        detail = f"it holds {held:,} and needs {value:,} more; {limit:,} available"
    else:
        fit = measure(replica, sequence)
        value = sequence.blocks_to_admit(block_size) - len(fit.hits)
        limit = value - fit.num_lacking
        detail = f"it needs {value:,} beside {len(fit.hits):,} cached ones; {limit:,} available"
    at_plan = left_out.num_lacking if left_out is not None and left_out.cause == "blocks" else 0
    if at_plan and value - limit != at_plan:
        detail += f"; it lacked {at_plan:,} when the plan looked at it"
    return Constraint(
        name="blocks",
        verdict="stops" if at_plan or value > limit else "met",
        replica=replica.index,
        value=value,
        limit=limit,
        detail=detail,
        decides=_is(inquiry, "blocks", replica.index),
    )


def _token_budget(inquiry: Inquiry, replica: Replica, plan: StepPlan | None, left_out: WaitReason | None) -> Constraint:
    limit = replica.config.max_num_batched_tokens
    if plan is None:
        if inquiry.reason is None:
            verdict: ConstraintVerdict = "met"
            detail = "it was in the plan of its latest step"
        else:
            verdict, detail = "unasked", "no plan has looked at it since it began to wait"
        return Constraint(name="token_budget", verdict=verdict, replica=replica.index, limit=limit, detail=detail)
    load = plan.load
    stops = left_out is not None and left_out.cause == "token_budget"
    used_up = "" if stops or load.num_tokens < limit else "; used up, but not what decided"
    return Constraint(
        name="token_budget",
        verdict="stops" if stops else "met",
        replica=replica.index,
        value=load.num_tokens,
        limit=limit,
        detail=f"the plan {_of_step(plan)} has {counted(load.decode_tokens, 'token')} of decodes and "
        f"{load.prefill_tokens:,} of prompts, at most {limit:,}{used_up}",
        decides=_is(inquiry, "token_budget", replica.index),
    )


def _batcher(inquiry: Inquiry, replica: Replica) -> Constraint:
    """value: tokens that it gave; limit: tokens that it was asked for."""
    answers = [
        entry
        for entry in inquiry.witness
        if isinstance(entry, ChunkAsked) and (entry.replica, entry.sequence) == (replica.index, inquiry.sequence.id)
    ]
    decides = _is(inquiry, "batcher", replica.index)
    if not answers:
        verdict: ConstraintVerdict = "stops" if decides else "unasked"
        detail = "it gave it nothing" if decides else "it was not asked"
        return Constraint(name="batcher", verdict=verdict, replica=replica.index, detail=detail, decides=decides)
    answer = answers[-1]
    return Constraint(
        name="batcher",
        verdict="met" if answer.num_tokens else "stops",
        replica=replica.index,
        value=answer.num_tokens,
        limit=answer.max_tokens,
        detail=f"it gave {answer.num_tokens:,} of at most {counted(answer.max_tokens, 'token')}",
        decides=decides,
    )


def _skips(inquiry: Inquiry, replica: Replica) -> Constraint:
    value, limit = inquiry.sequence.skips, replica.config.max_skips
    return Constraint(
        name="skips",
        verdict="met",
        replica=replica.index,
        value=value,
        limit=limit,
        detail=f"less urgent ones went before it {value} times; from {limit} on it closes the line if it lacks blocks",
    )


def live(state: CoreState, identity: tuple[int, int]) -> Sequence | None:
    """A sequence; None if it has ended, or never was."""
    request, index = identity
    found = state.requests.get(request)
    if found is None or not 0 <= index < found.arrival.n:
        return None
    sequence = found.sequences[index]
    return None if sequence.state is State.FINISHED else sequence


def named(identity: tuple[int, int]) -> str:
    """`7`, or `7.1` for a sample that is not the first."""
    request, index = identity
    return f"{request}.{index}" if index else f"{request}"
