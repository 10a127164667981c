"""Why a sequence is not in any step, as a question to the state after a drain. It changes nothing.

The scheduler notes which sequences a plan leaves out and why (`StepPlan`). What keeps a sequence from being planned at
all is in its own state and in that of its replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from eventlm.core.state.backend_state import Forwards
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State, Urgency
from eventlm.core.state.step_plan import StepPlan, WaitCause, WaitReason

#: With these causes a sequence is not considered for any step: what earlier plans say of it does not count any more.
_OUT_OF_LINE: tuple[WaitCause, ...] = ("grammar", "worker", "backend", "backoff", "paused", "draining", "text_end")
_NEARNESS = {cause: rank for rank, cause in enumerate(get_args(WaitCause))}


def find_wait_reason(state: CoreState, sequence: Sequence, plans: Mapping[int, StepPlan]) -> WaitReason | None:
    """Why a live sequence is in no step now; None if it is in one, or another server has it.

    plans: by replica, its latest plan since the sequence has been waiting, or resident without a row.
    """
    if sequence.state is State.WAITING_FOR_GRAMMAR:
        return WaitReason("grammar")
    if sequence.state is State.CLOSING:
        return WaitReason("text_end")
    forwards = state.set_of(sequence).forwards
    if forwards is not None:
        return _find_forward_reason(state, sequence, forwards)
    if sequence.in_flight:
        return None if sequence.resident else WaitReason("draining", sequence.replica)
    if state.paused:
        return WaitReason("paused")
    found = []
    for replica in takers_of(state, sequence):
        if replica.up and (sequence.resident or sequence.ticket):
            plan = plans.get(replica.index)
            reason = None if plan is None else plan.wait_reason(sequence)
            found.append(reason or WaitReason("steps_in_flight", replica.index))
    return min(found, key=lambda each: (_NEARNESS[each.cause], each.replica), default=WaitReason("worker"))


def _find_forward_reason(state: CoreState, sequence: Sequence, forwards: Forwards) -> WaitReason | None:
    """Why no other server has it. Whoever waits is sent as soon as one has room, so that no plan need be known."""
    if sequence.resident:
        return None
    attempts = forwards.attempts.get(sequence.id)
    if sequence.id in forwards.resting:
        return WaitReason("backoff")
    if state.paused:
        return WaitReason("paused")
    avoided = -1 if attempts is None else attempts.avoided
    found = [
        WaitReason("avoided" if replica.has_room() and replica.index == avoided else "backend_limit", replica.index)
        for replica in takers_of(state, sequence)
        if replica.up
    ]
    return min(found, key=lambda each: (_NEARNESS[each.cause], each.replica), default=WaitReason("backend"))


def takers_of(state: CoreState, sequence: Sequence) -> list[Replica]:
    """The replicas that could compute it: the one that it is on or was sent to, else all of its set."""
    home = sequence.replica if sequence.resident else sequence.home
    return state.set_of(sequence).replicas if home < 0 else [state.replicas[home]]


def find_present_wait_reason(state: CoreState, sequence: Sequence) -> WaitReason | None:
    """The same by what the state itself remembers: each replica's latest plan, if the sequence was there by then."""
    arrived_ns = sequence.arrival.ts
    plans = {index: plan for index, plan in state.latest_plans.items() if plan.load.now_ns >= arrived_ns}
    return find_wait_reason(state, sequence, plans)


class WaitWatch:
    """Follows one sequence from drain to drain, because a plan that left it out holds until the next one.

    plans: by replica, the latest plan since it began to wait, or to be resident without a row.
    """

    def __init__(self) -> None:
        self.plans: dict[int, StepPlan] = {}
        #: Which of its residencies it was in after the drain before; 0: none.
        self._residency = 0

    def look(self, state: CoreState, sequence: Sequence) -> WaitReason | None:
        """Why it is in no step after this drain; None if it is in one. To be called after every drain."""
        residency = sequence.residency if sequence.resident else 0
        if self._residency not in (0, residency):
            # It was preempted.
            self.plans.clear()
        self._residency = residency
        self.plans |= state.plans
        reason = find_wait_reason(state, sequence, self.plans)
        if reason is None or reason.cause in _OUT_OF_LINE:
            self.plans.clear()
        return reason


def first_plan_that_counts(state: CoreState, sequence: Sequence) -> int:
    """The position from which on a `WaitWatch` must follow a live sequence to know why it waits after this drain.

    A replica with room for a step was planned in this drain. The latest plan of one without room is that of its latest
    launch, because nothing is planned until a step has completed.
    """
    unplanned = [replica for replica in takers_of(state, sequence) if replica.index not in state.plans]
    launches = [replica.in_flight[-1].launch_seq for replica in unplanned if replica.in_flight]
    return min(launches, default=state.next_seq)


def urgency_now(state: CoreState, sequence: Sequence) -> Urgency:
    """By which it is ordered now: in line by the latest keys, resident by that of its admission or of its prefill."""
    replicaset = state.set_of(sequence)
    priority, key, request, index = sequence.urgency
    if sequence.ticket:
        if not replicaset.policy.static:
            return replicaset.queue_of(sequence).candidate(sequence).urgency
        key = sequence.key
    elif sequence.state is State.PREFILL:
        key = replicaset.partial_keys.get(sequence.id, key)
    return priority, key, request, index
