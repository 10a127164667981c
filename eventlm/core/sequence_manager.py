"""The life of sequences: groups are admitted or rejected, ends come in one phase or two, requests leave.

Functions take the state and change it; each stands for what one kind of fact means to a sequence.
"""

from __future__ import annotations

from eventlm.core.plugin import SequenceView
from eventlm.core.plugin_calls import ask_policy
from eventlm.core.state.backend_state import Attempts, Forwards
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.digest import combine
from eventlm.core.state.sequence import AdmittedRequest, Sequence, State
from eventlm.errors import InvariantError
from eventlm.events import (
    Admitted,
    Arrived,
    Cancelled,
    Closing,
    Finished,
    FrontEndLost,
    GrammarReady,
    Rejected,
    TextEnded,
    TimerDue,
    TimerSet,
)
from eventlm.events.decisions import RejectReason
from eventlm.types import FinishReason


def arrive(state: CoreState, arrival: Arrived) -> None:
    """Collect a group; with its last member, admit or reject it as one."""
    first = state.group[0] if state.group else arrival
    if arrival.group_index != len(state.group) or first.group_size != arrival.group_size:
        raise InvariantError(
            f"arrival {arrival.s} is member {arrival.group_index} of a group of {arrival.group_size}, "
            f"but member {len(state.group)} of {first.group_size} was due"
        )
    if arrival.replicaset != first.replicaset or not 0 <= arrival.replicaset < len(state.replicasets):
        raise InvariantError(
            f"arrival {arrival.s} is for replicaset {arrival.replicaset} of {len(state.replicasets)}, "
            f"its group for {first.replicaset}"
        )
    least_tokens = 1 if arrival.scheduling.kind == "generate" else 0
    if arrival.n < 1 or arrival.prompt_tokens < 1 or arrival.max_tokens < least_tokens:
        raise InvariantError(f"arrival {arrival.s} has no sequence, no prompt or nothing to produce")
    state.group.append(arrival)
    state.rng_digest = combine((state.rng_digest, arrival.seed))
    if len(state.group) < arrival.group_size:
        return
    group, state.group = state.group, []
    reason = _reason_to_reject(state, group)
    for member in group:
        if reason is None:
            _register(state, member)
        else:
            state.decide(Rejected, because=member.s, request=member.s, reason=reason)


def _reason_to_reject(state: CoreState, group: list[Arrived]) -> RejectReason | None:
    replicaset = state.replicasets[group[0].replicaset]
    config = replicaset.config
    if any(member.prompt_tokens + member.max_tokens > config.max_model_len for member in group):
        return "context_length"
    num_sequences = sum(member.n for member in group)
    # Closing sequences count, so that an edge that never looks at its texts cannot pile them up.
    num_waiting = replicaset.num_waiting + replicaset.num_closing
    num_beyond = num_waiting + num_sequences - config.max_queue_len
    if num_beyond > 0 and num_beyond > replicaset.num_free_slots and not group[0].scheduling.offline:
        return "queue_full"
    return None


def _register(state: CoreState, arrival: Arrived) -> None:
    replicaset = state.replicasets[arrival.replicaset]
    prefill_ns = replicaset.prefill_ns(arrival.prompt_tokens)
    sequences = [Sequence(arrival, i, SequenceView.of(arrival, i, prefill_ns)) for i in range(arrival.n)]
    state.requests[arrival.s] = AdmittedRequest(arrival, sequences)
    replicaset.num_waiting += arrival.n
    state.decide(Admitted, because=arrival.s, request=arrival.s)
    for sequence in sequences:
        state.touch(sequence)
        if sequence.state is State.WAITING:
            replicaset.unrouted[sequence.id] = sequence
    if arrival.scheduling.drop_if_late and sequences[0].view.deadline_ns:
        _watch_deadline(state, state.requests[arrival.s], because=arrival.s)


def enqueue(state: CoreState, sequence: Sequence) -> None:
    """A waiting sequence with nothing in flight gets in line where its router put it."""
    replicaset = state.set_of(sequence)
    view = sequence.view
    view.prompt_tokens = sequence.num_tokens
    view.output_tokens = sequence.num_output_tokens
    view.cached_tokens = 0
    view.remaining_ns = replicaset.prefill_ns(sequence.num_tokens)
    is_static = replicaset.policy.static
    if is_static and sequence.key_generation != replicaset.policy_generation:
        keys, sequence.key_generation = ask_policy(state, replicaset, [view])
        sequence.key = keys[0]
    replicaset.line_up(sequence, sequence.key if is_static else sequence.urgency[1])


def text_end(state: CoreState, fact: TextEnded) -> None:
    """What the front end found in a sequence's text: an end of its own, or the answer to `closing`."""
    request = state.requests.get(fact.request)
    if request is None or not request.arrival.scheduling.has_text_ends or not 0 <= fact.index < request.arrival.n:
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
    """An end was seen after the last confirmed token: finish, or close until the front end has looked at the text."""
    if not sequence.arrival.scheduling.has_text_ends:
        finish(state, sequence, reason, sequence.num_output_tokens)
        return
    _leave(state, sequence)
    sequence.closing_reason = reason
    sequence.transition(State.CLOSING)
    state.set_of(sequence).num_closing += 1
    state.touch(sequence)
    state.decide(
        Closing,
        request=sequence.request,
        index=sequence.index,
        reason=reason,
        position=sequence.num_output_tokens,
    )


def finish(state: CoreState, sequence: Sequence, reason: FinishReason, position: int) -> None:
    """The end of a sequence, and with the last of its request that of the request."""
    _leave(state, sequence)
    sequence.transition(State.FINISHED)
    state.forget(sequence)
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
        if request.has_timer:
            state.bury_timer()


def cancel(state: CoreState, fact: Cancelled) -> None:
    """All sequences of a request that have not ended end; nothing if it has."""
    _finish_request(state, fact.request, "cancelled")


def lose_front_end(state: CoreState, fact: FrontEndLost) -> None:
    """All requests of a front end end, in order of arrival."""
    lost = [seq for seq, request in state.requests.items() if request.arrival.scheduling.front_end == fact.front_end]
    for request_seq in lost:
        _finish_request(state, request_seq, "front_end_lost")


def _finish_request(state: CoreState, request_seq: int, reason: FinishReason) -> None:
    request = state.requests.get(request_seq)
    if request is None:
        return
    for sequence in request.sequences:
        if sequence.state is not State.FINISHED:
            finish(state, sequence, reason, sequence.num_output_tokens)


def timers_due(state: CoreState, fact: TimerDue) -> None:
    """Deadlines have passed, or cannot be met any more: sequences without a first token end."""
    if fact.due_ns > fact.ts:
        raise InvariantError(f"timers are due up to {fact.due_ns}, which is after {fact.ts}")
    for request_seq in state.pop_timers(fact.due_ns):
        _watch_deadline(state, state.requests[request_seq], because=fact.s)


def _watch_deadline(state: CoreState, request: AdmittedRequest, *, because: int) -> None:
    """End those sequences of a request with `drop_if_late` that will have no first token in time; set a timer for the
    others.

    One that waits ends once its prompt alone is predicted to take longer than what is left; one that is on a replica
    may go on until the deadline, for its prediction leaves out what it does not know.
    """
    arrival = request.arrival
    due_ns = arrival.ts + request.sequences[0].view.deadline_ns
    look_ns = []
    for sequence in request.sequences:
        if sequence.ended or sequence.num_output_tokens:
            continue
        last_ns = due_ns
        if not sequence.resident and not sequence.in_flight:
            last_ns = min(due_ns, due_ns - _least_prefill_ns(state, sequence) + 1)
        if last_ns <= state.now_ns:
            finish(state, sequence, "deadline", 0)
        else:
            look_ns.append(last_ns)
    if look_ns:
        state.add_timer(min(look_ns), arrival.s)
        request.has_timer = True
        state.decide(TimerSet, because=because, request=arrival.s, due_ns=min(look_ns))


def _least_prefill_ns(state: CoreState, sequence: Sequence) -> int:
    """Predicted time of a waiting sequence's prompt if it went on alone, with all that can be hit on any replica."""
    replicaset = state.set_of(sequence)
    return replicaset.prefill_ns(sequence.num_tokens, replicaset.best_hit_tokens(sequence))


def grammar_ready(state: CoreState, fact: GrammarReady) -> None:
    """The matcher is there, so the sequences may be scheduled; or it failed, and they end."""
    request = state.requests.get(fact.request)
    if request is None:
        return
    for sequence in request.sequences:
        if sequence.state is not State.WAITING_FOR_GRAMMAR:
            continue
        if fact.error:
            finish(state, sequence, "error", 0)
        else:
            sequence.transition(State.WAITING)
            state.touch(sequence)
            state.set_of(sequence).unrouted[sequence.id] = sequence


def forget_attempts(state: CoreState, forwards: Forwards, sequence: Sequence) -> None:
    """A sequence that may have been sent to other servers has ended."""
    forwards.resting.pop(sequence.id, None)
    attempts = forwards.attempts.pop(sequence.id, None)
    if attempts is not None and attempts.hedge:
        end_hedge(state, attempts)


def end_hedge(state: CoreState, attempts: Attempts) -> None:
    """The second attempt is over, or counts as the first from now on."""
    replica = state.replicas[attempts.hedge_replica]
    assert replica.capacity is not None
    replica.capacity.num_hedges -= 1
    replica.note_capacity()
    attempts.hedge = 0


def _leave(state: CoreState, sequence: Sequence) -> None:
    """Give back what the sequence has: its position in the queue, or its blocks and slot. It is no suspect any more."""
    replicaset = state.set_of(sequence)
    if sequence.resident:
        state.replicas[sequence.replica].vacate(sequence)
    elif sequence.state in (State.WAITING, State.WAITING_FOR_GRAMMAR):
        replicaset.num_waiting -= 1
        if sequence.ticket:
            replicaset.leave_line(sequence)
        replicaset.unrouted.pop(sequence.id, None)
    elif sequence.state is State.CLOSING:
        replicaset.num_closing -= 1
    if replicaset.forwards is not None:
        forget_attempts(state, replicaset.forwards, sequence)
    replicaset.clear_suspect(sequence.id)
