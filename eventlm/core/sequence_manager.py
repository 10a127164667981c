"""The life of sequences: groups are admitted or rejected, ends come in one phase or two, requests leave.

Functions take the state and change it; each stands for what one kind of fact means to a sequence.
"""

from __future__ import annotations

from eventlm.core.digest import combine
from eventlm.core.plugin import SequenceView
from eventlm.core.sequence import FIRST_ENDED, Request, Sequence, State
from eventlm.core.state import CoreState
from eventlm.core.waiting_queue import WaitingQueue
from eventlm.errors import InvariantError
from eventlm.events import Admitted, Arrived, Closed, Finished, Rejected, TextEnded, TimerSet
from eventlm.events.decisions import RejectReason
from eventlm.types import FinishReason


def arrive(state: CoreState, arrival: Arrived) -> None:
    """Collect a group; with its last member, admit or reject it as one."""
    if arrival.group_index != len(state.group) or (state.group and state.group[0].group_size != arrival.group_size):
        raise InvariantError(
            f"arrival {arrival.s} is member {arrival.group_index} of a group of {arrival.group_size}, "
            f"but member {len(state.group)} was due"
        )
    state.group.append(arrival)
    state.rng_digest = combine((state.rng_digest, arrival.seed))
    if len(state.group) < arrival.group_size:
        return
    group, state.group = state.group, []
    reason = _reason_to_reject(state, group)
    for member in group:
        if reason is None:
            _admit(state, member)
        else:
            state.decide(Rejected, because=member.s, request=member.s, reason=reason)


def _reason_to_reject(state: CoreState, group: list[Arrived]) -> RejectReason | None:
    if any(member.prompt_tokens + member.max_tokens > state.config.max_model_len for member in group):
        return "context_length"
    num_sequences = sum(member.n for member in group)
    num_free_slots = sum(state.config.max_num_seqs - len(replica.running) for replica in state.replicas if replica.up)
    if state.num_waiting + num_sequences > state.config.max_queue_len + num_free_slots and not group[0].offline:
        return "queue_full"
    return None


def _admit(state: CoreState, arrival: Arrived) -> None:
    prefill_ns = state.predictor.prefill_ns(arrival.prompt_tokens, 0, state.config.max_num_batched_tokens)
    sequences = []
    for index in range(arrival.n):
        view = SequenceView(
            request=arrival.s,
            index=index,
            priority=arrival.priority,
            arrival_ns=arrival.ts,
            deadline_ns=arrival.deadline_ns or arrival.slo_ttft_ns,
            prompt_tokens=arrival.prompt_tokens,
            prefill_ns=prefill_ns,
            service_class=arrival.service_class,
            session=arrival.session,
        )
        sequences.append(Sequence(arrival, index, view))
    state.requests[arrival.s] = Request(arrival, sequences)
    state.num_waiting += arrival.n
    state.decide(Admitted, because=arrival.s, request=arrival.s)
    for sequence in sequences:
        state.touch(sequence)
        if sequence.state is State.WAITING:
            state.unrouted.append(sequence)
    deadline_ns = arrival.deadline_ns or arrival.slo_ttft_ns
    if arrival.drop_if_late and deadline_ns:
        due_ns = arrival.ts + deadline_ns
        state.add_timer(due_ns, arrival.s)
        state.decide(TimerSet, because=arrival.s, request=arrival.s, due_ns=due_ns)


def queue_of(state: CoreState, sequence: Sequence) -> WaitingQueue:
    """The queue that a waiting sequence with a ticket is in."""
    return state.shared_queue if sequence.home < 0 else state.replicas[sequence.home].queue


def enqueue(state: CoreState, sequence: Sequence) -> None:
    """A waiting sequence with nothing in flight gets in line where its router put it."""
    view = sequence.view
    view.prompt_tokens = sequence.total
    view.output_tokens = sequence.num_output_tokens
    view.remaining_ns = state.predictor.prefill_ns(sequence.total, 0, state.config.max_num_batched_tokens)
    key = state.keys_for([view])[0] if state.policy.static else sequence.urgency[1]
    queue_of(state, sequence).add(sequence, key)


def text_end(state: CoreState, fact: TextEnded) -> None:
    """The edge's word on a sequence's text: an end of its own, or the answer to `closing`."""
    request = state.requests.get(fact.request)
    if request is None or not request.arrival.has_text_ends or fact.index >= request.arrival.n:
        return
    sequence = request.sequences[fact.index]
    if sequence.state is State.FINISHED:
        return
    position = min(max(fact.position, 0), sequence.num_output_tokens)
    if fact.reason:
        finish(state, sequence, "tool_calls" if fact.reason == "tool_calls" else "stop", position)
    elif sequence.closing_reason is not None:
        finish(state, sequence, sequence.closing_reason, sequence.num_output_tokens)


def end(state: CoreState, sequence: Sequence, reason: FinishReason) -> None:
    """Worker or core saw an end behind the last confirmed token: finish, or close until the edge has looked."""
    if not sequence.arrival.has_text_ends:
        finish(state, sequence, reason, sequence.num_output_tokens)
        return
    _leave(state, sequence)
    sequence.closing_reason = reason
    sequence.transition(State.CLOSING)
    state.touch(sequence)
    state.decide(
        Closed,
        request=sequence.request,
        index=sequence.index,
        reason=reason,
        position=sequence.num_output_tokens,
    )


def finish(state: CoreState, sequence: Sequence, reason: FinishReason, position: int) -> None:
    """The end of a sequence, and with the last of its request that of the request."""
    _leave(state, sequence)
    sequence.transition(State.FINISHED)
    state.touch(sequence)
    state.decide(
        Finished,
        request=sequence.request,
        index=sequence.index,
        reason=reason,
        position=position,
        cached_tokens=sequence.cached_tokens,
    )
    request = state.requests[sequence.request]
    request.num_unfinished -= 1
    if not request.num_unfinished:
        del state.requests[sequence.request]


def finish_request(state: CoreState, request_seq: int, reason: FinishReason) -> None:
    """End all sequences of a request that have not ended; nothing if it has."""
    request = state.requests.get(request_seq)
    if request is None:
        return
    for sequence in request.sequences:
        if sequence.state is not State.FINISHED:
            finish(state, sequence, reason, sequence.num_output_tokens)


def drop_late(state: CoreState, request_seq: int) -> None:
    """A request's deadline has passed: sequences without a first token end."""
    request = state.requests.get(request_seq)
    if request is None:
        return
    for sequence in request.sequences:
        if sequence.state < FIRST_ENDED and sequence.num_output_tokens == 0:
            finish(state, sequence, "deadline", 0)


def lose_front_end(state: CoreState, front_end: int) -> None:
    """All requests of a front end end, in order of arrival."""
    lost = [seq for seq, request in state.requests.items() if request.arrival.front_end == front_end]
    for request_seq in lost:
        finish_request(state, request_seq, "front_end_lost")


def grammar_ready(state: CoreState, request_seq: int, error: str) -> None:
    """The matcher is there, so the sequences may be scheduled; or it failed, and they end."""
    request = state.requests.get(request_seq)
    if request is None:
        return
    for sequence in request.sequences:
        if sequence.state is not State.HELD:
            continue
        if error:
            finish(state, sequence, "error", 0)
        else:
            sequence.transition(State.WAITING)
            state.touch(sequence)
            state.unrouted.append(sequence)


def _leave(state: CoreState, sequence: Sequence) -> None:
    """Give back what the sequence has: its place in line, or its blocks and slot."""
    if sequence.resident:
        state.replicas[sequence.replica].vacate(sequence)
    elif sequence.state in (State.WAITING, State.HELD):
        state.num_waiting -= 1
        if sequence.ticket:
            queue_of(state, sequence).remove(sequence)
        elif sequence in state.unrouted:
            state.unrouted.remove(sequence)
