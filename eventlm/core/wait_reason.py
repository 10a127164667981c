"""Why a sequence is not in any step, as a question to the state after a drain. It changes nothing.

The scheduler decides which sequences run. This finds what another one lacked, by the functions that the scheduler uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from eventlm.core.admission import measure
from eventlm.core.poison_requests import find_trial, is_held_back, is_suspect
from eventlm.core.preemption import find_victims
from eventlm.core.replica import Replica
from eventlm.core.scheduler import waiting_head
from eventlm.core.sequence import Sequence, State, Urgency
from eventlm.core.state import CoreState
from eventlm.events import Launched
from eventlm.types import SequenceId

#: From the one nearest to running to the one farthest from it, as far as several replicas could take the sequence.
Cause = Literal[
    "steps_in_flight",  # the pipeline is full with steps that were planned before it came, or with one that takes long
    "batcher",  # the batcher gave its prefill no chunk
    "token_budget",  # the latest step was full with more urgent rows
    "head_of_line",  # a more urgent one does not fit and may not be passed over
    "trial",  # a suspect is tried alone (see `eventlm.core.poison_requests`)
    "blocks",  # the pool has too few for it
    "sequence_limit",  # max_num_seqs sequences are resident
    "worker",  # no worker is up
    "paused",
    "draining",  # preempted, and rows of it are still in flight
    "grammar",  # its matcher is not built
    "text_end",  # the edge has yet to look at its text
]
_NEARNESS: tuple[Cause, ...] = (
    "steps_in_flight",
    "batcher",
    "token_budget",
    "head_of_line",
    "trial",
    "blocks",
    "sequence_limit",
)


class WaitReason(NamedTuple):
    """Why a sequence is in no step. `replica` is the one that could take it first, -1 where none could.

    num_lacking: blocks that it lacks. other: the more urgent one that does not fit, or the suspect that is tried.
    """

    cause: Cause
    replica: int = -1
    num_lacking: int = 0
    other: SequenceId | None = None


def find_wait_reason(state: CoreState, sequence: Sequence, launches: Mapping[int, Launched]) -> WaitReason | None:
    """Why a live sequence is in no step now; None if it is in one.

    launches: by replica, its latest launch since the sequence has been waiting, or resident without a row.
    """
    if sequence.state is State.WAITING_FOR_GRAMMAR:
        return WaitReason("grammar")
    if sequence.state is State.CLOSING:
        return WaitReason("text_end")
    if sequence.in_flight:
        return None if sequence.resident else WaitReason("draining", sequence.replica)
    if state.paused:
        return WaitReason("paused")
    if sequence.resident:
        return _left_out(state, state.replicas[sequence.replica], sequence, launches.get(sequence.replica))
    takers = state.replicas if sequence.home < 0 else [state.replicas[sequence.home]]
    takers = [replica for replica in takers if replica.up and sequence.ticket]
    found = [_kept_waiting(state, replica, sequence, launches.get(replica.index)) for replica in takers]
    return min(found, key=lambda each: (_NEARNESS.index(each.cause), each.replica), default=WaitReason("worker"))


def _left_out(state: CoreState, replica: Replica, sequence: Sequence, launched: Launched | None) -> WaitReason:
    """Why a resident has no row."""
    trial = find_trial(state, replica)
    if trial is not None:
        return WaitReason("trial", replica.index, other=trial.id)
    if _is_full(state, launched):
        return WaitReason("token_budget", replica.index)
    if sequence.state is State.PREFILL and _was_planned(state, replica, launched):
        return WaitReason("batcher", replica.index)
    return WaitReason("steps_in_flight", replica.index)


def _kept_waiting(state: CoreState, replica: Replica, sequence: Sequence, launched: Launched | None) -> WaitReason:
    """Why a replica has not admitted a sequence that waits in line for it."""
    trial = find_trial(state, replica) or (sequence if is_held_back(state, sequence) else None)
    if trial is sequence and launched is not None and not is_held_back(state, sequence):
        # It did not fit when that step was planned, and by now it would.
        return WaitReason("steps_in_flight", replica.index)
    if trial is not None:
        return WaitReason("trial", replica.index, other=trial.id)
    was_planned = _was_planned(state, replica, launched)
    head = waiting_head(state, replica)
    is_head = head is not None and head.sequence is sequence
    if not was_planned and state.policy.static and head is not None and is_head and find_victims(state, replica, head):
        # It waits for the next plan alone, where it makes room for itself.
        return WaitReason("steps_in_flight", replica.index)
    num_lacking = measure(state, replica, sequence).num_lacking
    # Had it not lacked blocks when it was passed over, it would have had a slot before others.
    if len(replica.running) >= state.config.max_num_seqs and not (sequence.skips and num_lacking > 0):
        return WaitReason("sequence_limit", replica.index)
    if num_lacking > 0:
        return WaitReason("blocks", replica.index, num_lacking=num_lacking)
    if not was_planned and not state.policy.static:
        # No round has read its key yet.
        return WaitReason("steps_in_flight", replica.index)
    is_full = _is_full(state, launched)
    if head is not None and not is_head and not _fits(state, replica, head.sequence):
        closes_line = head.sequence.skips >= state.config.max_skips
        # One that may be passed over closes it too, where too many after it do not fit.
        if closes_line or (was_planned and not is_full):
            return WaitReason("head_of_line", replica.index, other=head.sequence.id)
    # If neither, it was looked at and did not fit, and by now it would; or no step was planned since it came.
    return WaitReason("token_budget" if is_full else "steps_in_flight", replica.index)


def _was_planned(state: CoreState, replica: Replica, launched: Launched | None) -> bool:
    """Whether a step was planned since a sequence came in line: there was room for one, if nothing was launched."""
    return launched is not None or replica.has_room(state.config)


def _is_full(state: CoreState, launched: Launched | None) -> bool:
    return launched is not None and launched.num_tokens >= state.config.max_num_batched_tokens


def _fits(state: CoreState, replica: Replica, sequence: Sequence) -> bool:
    if is_suspect(state, sequence):
        # One that is held back does not keep others from running.
        return is_held_back(state, sequence)
    return measure(state, replica, sequence).num_lacking <= 0


def urgency_now(state: CoreState, sequence: Sequence) -> Urgency:
    """By which it is ordered now: in line by the latest keys, resident by that of its admission or of its prefill."""
    priority, key, request, index = sequence.urgency
    if sequence.ticket:
        if not state.policy.static:
            return state.queue_of(sequence).candidate(sequence).urgency
        key = sequence.key
    elif sequence.state is State.PREFILL:
        key = state.partial_keys.get(sequence.id, key)
    return priority, key, request, index
