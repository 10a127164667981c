"""The oldest sequences of a running engine, and why those wait that are in no step. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from msgspec import Struct

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.step_plan import WaitCause
from eventlm.core.wait_reason import find_present_wait_reason
from eventlm.engine.admin import ReplicaStatus, replica_statuses
from eventlm.engine.request_registry import SampleState, sample_state
from eventlm.scheduling_params import LOWEST_PRIORITY

#: Of each kind, waiting and running.
MAX_LISTED = 200


class Wait(Struct, frozen=True, kw_only=True):
    """Why a sequence is in no step: see `eventlm.core.state.step_plan.WaitCause`.

    replica: the one that could take it first, -1 where none could. num_lacking: blocks that it lacks. other: the
    request and the sample that it waits for, if it waits for one. remaining_ns: of a backoff, until its next attempt.
    """

    cause: WaitCause
    replica: int
    num_lacking: int
    other: tuple[int, int] | None
    remaining_ns: int = 0


class ListedSequence(Struct, frozen=True, kw_only=True):
    """A sequence: the seq of its request's arrival in the trace, and which of the request's samples it is.

    age_ns: since its arrival. replica: where it is or was resident, -1 before; for other servers, as `GET
    /admin/backends` numbers them. num_blocks: 0 there. num_restarts: how often it has lost its blocks, or an attempt
    has failed. wait: None while it is in a step, or another server has it.
    """

    request: int
    index: int
    state: SampleState
    age_ns: int
    service_class: str
    priority: int
    replica: int
    prompt_tokens: int
    output_tokens: int
    num_blocks: int
    num_restarts: int
    wait: Wait | None


class OldestRequests(Struct, frozen=True, kw_only=True):
    """The oldest sequences that wait and those that are resident, oldest first, and the engine at that moment.

    policy: the one in force. num_requests, num_waiting: of all requests, and of all sequences that wait. replicas:
    those with workers.
    """

    paused: bool
    policy: str
    num_requests: int
    num_waiting: int
    replicas: list[ReplicaStatus]
    waiting: list[ListedSequence]
    running: list[ListedSequence]


def oldest_requests(state: CoreState, now_ns: int, limit: int) -> OldestRequests:
    """Up to `limit` of each kind, and no more than MAX_LISTED. Costs as much as is listed, and a look at each resident.

    It is for the time between two drains.
    """
    limit = min(limit, MAX_LISTED)
    residents = [sequence for replica in state.replicas for sequence in replica.running]
    return OldestRequests(
        paused=state.paused,
        policy=state.policy_name,
        num_requests=len(state.requests),
        num_waiting=state.num_waiting,
        replicas=replica_statuses(state),
        waiting=[_listed(state, sequence, now_ns) for sequence in islice(_waiting(state), limit)],
        running=[_listed(state, each, now_ns) for each in sorted(residents, key=attrgetter("id"))[:limit]],
    )


def longest_wait_ns(state: CoreState, replicaset: int, now_ns: int) -> int:
    """How long the oldest sequence waits for a replicaset, of requests above the lowest priority; 0: none does."""
    if not state.replicasets[replicaset].num_waiting:
        return 0
    for sequence in _waiting(state):
        arrival = sequence.arrival
        if arrival.replicaset == replicaset and arrival.scheduling.priority != LOWEST_PRIORITY:
            return max(now_ns - arrival.ts, 0)
    return 0


def _waiting(state: CoreState) -> Iterator[Sequence]:
    """In order of arrival, as far as they are asked for and there are any."""
    num_left = state.num_waiting
    for request in state.requests.values():
        for sequence in request.sequences:
            if not num_left:
                return
            if sequence.state <= State.WAITING:
                num_left -= 1
                yield sequence


def _listed(state: CoreState, sequence: Sequence, now_ns: int) -> ListedSequence:
    arrival, forwards = sequence.arrival, state.set_of(sequence).forwards
    return ListedSequence(
        request=sequence.request,
        index=sequence.index,
        state=sample_state(state, sequence),
        age_ns=max(now_ns - arrival.ts, 0),
        service_class=arrival.scheduling.service_class,
        priority=arrival.scheduling.priority,
        replica=sequence.replica,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.num_output_tokens,
        num_blocks=0 if forwards is not None else len(sequence.block_table),
        num_restarts=max(sequence.residency - sequence.resident, 0),
        wait=_wait(state, sequence, now_ns),
    )


def _wait(state: CoreState, sequence: Sequence, now_ns: int) -> Wait | None:
    reason = find_present_wait_reason(state, sequence)
    if reason is None:
        return None
    forwards, remaining_ns = state.set_of(sequence).forwards, 0
    if forwards is not None and reason.cause == "backoff":
        remaining_ns = max(forwards.attempts[sequence.id].due_ns - now_ns, 0)
    return Wait(
        cause=reason.cause,
        replica=reason.replica,
        num_lacking=reason.num_lacking,
        other=reason.other,
        remaining_ns=remaining_ns,
    )
