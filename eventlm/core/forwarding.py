"""Sequences are forwarded to replicas that are other servers, and tried again where that fails.

Such a replica has no steps: a sequence that is admitted there is one request to that server, and its blocks stand for
what the server's prefix cache is taken to hold. The turn of each server with room comes as that of a replica with room
for a step does (see `eventlm.core.state.turns`), the one with the least load first.

A failed attempt costs its share of a budget and waits: twice as long with each further attempt, less up to a half that
the request's seed draws; where there is no other server, after what the failed one asked for. Nothing is sent again
once tokens were shown, unless the next server can go on from them.
"""

from __future__ import annotations

from heapq import heappop, heappush

from eventlm.core.admission import admit, measure
from eventlm.core.sequence_manager import end_hedge, finish
from eventlm.core.state.backend_state import Attempts, BackendCapacity, Forwards
from eventlm.core.state.core_state import CoreState, replica_of
from eventlm.core.state.digest import combine
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.waiting_queue import Candidate
from eventlm.errors import InvariantError
from eventlm.events import (
    BackendDown,
    BackendState,
    BackendUp,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    RetrySet,
    Streamed,
    Withdrawn,
)
from eventlm.types import SequenceId

#: The longest wait of the backoff itself, and the longest that a server may ask for. A longer one is the client's.
MOST_BACKOFF_NS = 60_000_000_000
_PPM = 1_000_000


def forward_next(state: CoreState, replica: Replica) -> bool:
    """Send the most urgent sequence that waits for a server there; False if there is none, or no room."""
    replicaset = state.set_of(replica)
    if not replica.up or not replica.has_room() or not replicaset.num_waiting:
        return False
    candidate = _next_candidate(replicaset, replica)
    if candidate is None:
        return False
    sequence, forwards = candidate.sequence, _forwards(replicaset)
    fit = measure(replica, sequence)
    admit(state, replica, candidate, fit)
    sequence.launched_tokens = sequence.prefill_tokens
    size = replica.config.block_size
    replica.publish(sequence, min(sequence.num_tokens // size, len(sequence.block_names), len(sequence.block_table)))
    replica.finish_prefill(sequence)
    attempts = forwards.attempts.setdefault(sequence.id, Attempts())
    if not attempts.number:
        forwards.earn()
    attempts.number += 1
    attempts.current = attempts.number
    attempts.sent, attempts.sent_ns = state.next_seq, state.now_ns
    state.touch(sequence)
    _note_forward(state, replica, sequence, attempts, num_cached=len(fit.hits) * size)
    deadline_ns = _deadline_ns(sequence)
    if forwards.config.hedge_ns and deadline_ns and not sequence.num_output_tokens:
        due_ns = max(deadline_ns - forwards.config.hedge_ns, state.now_ns + 1)
        heappush(state.retries, (due_ns, *sequence.id, attempts.current))
    return True


def _next_candidate(replicaset: Replicaset, replica: Replica) -> Candidate | None:
    """The most urgent of those that may go there. Of those that any server may take, one that has just failed there
    waits for another server, if one is up. Nobody else takes those of its own line.
    """
    attempts = _forwards(replicaset).attempts
    shared = replicaset.shared_queue
    found = shared.peek()
    while (
        found is not None
        and len(replicaset.tally.ups) > 1
        and (known := attempts.get(found.sequence.id)) is not None
        and known.avoided == replica.index
    ):
        shared.pass_over()
        found = shared.peek()
    shared.end_plan()
    own = replica.queue.peek()
    return own if own is not None and (found is None or own.urgency < found.urgency) else found


def _note_forward(
    state: CoreState,
    replica: Replica,
    sequence: Sequence,
    attempts: Attempts,
    *,
    num_cached: int,
    is_hedge: bool = False,
) -> None:
    state.decide(
        Forwarded,
        request=sequence.request,
        index=sequence.index,
        replica=replica.index,
        attempt=attempts.number,
        cached_tokens=num_cached,
        running=replica.num_sent,
        limit=_capacity(replica).limit,
        hedge=is_hedge,
    )


def backend_up(state: CoreState, fact: BackendUp) -> None:
    """A server takes requests. A no-op unless its epoch is newer than every epoch seen so far."""
    replica = _backend_of(state, fact.replica)
    if fact.epoch <= replica.epoch:
        return
    if not 0 < fact.weight_ppm <= 1_000 * _PPM or fact.max_concurrency < 0:
        raise InvariantError(f"event {fact.s}: weight {fact.weight_ppm}, and {fact.max_concurrency} requests at once")
    if replica.up:
        replica.stop_worker()
    # It may be another server than the one before, or the same without its cache.
    replica.pool.flush()
    capacity, config = _capacity(replica), replica.config
    assert config.forwards
    most = min(fact.max_concurrency or config.max_num_seqs, config.max_num_seqs)
    first = fact.max_concurrency or config.forwards.first_limit
    replica.capacity = BackendCapacity(
        most, 1000 * min(first, most), fact.weight_ppm, capacity.num_hedges, decreased_at=state.next_seq
    )
    replica.start_worker(fact.epoch)


def backend_down(state: CoreState, fact: BackendDown) -> None:
    """A server gets no further requests. Those that wait for it alone are offered to the router again."""
    replica = _backend_of(state, fact.replica)
    if fact.epoch < replica.epoch:
        return
    replica.epoch = fact.epoch
    if replica.up:
        _stop(state, replica)


def _stop(state: CoreState, replica: Replica) -> None:
    replica.stop_worker()
    replicaset = state.set_of(replica)
    # Whoever avoided another server may have no choice now.
    replicaset.note_all()
    for sequence in replica.queue.members[:]:
        replica.leave_line(sequence)
        sequence.home = -1
        state.touch(sequence)
        replicaset.unrouted[sequence.id] = sequence


def backend_state(state: CoreState, fact: BackendState) -> None:
    """A server that says that requests wait there has been sent too many."""
    replica = _backend_of(state, fact.replica)
    if fact.epoch != replica.worker:
        return
    capacity = _capacity(replica)
    capacity.running, capacity.waiting, capacity.kv_used_ppm = fact.running, fact.waiting, fact.kv_used_ppm
    capacity.note_waiting(replica.num_sent, state.next_seq)
    replica.note_capacity()


def stream(state: CoreState, fact: Streamed) -> None:
    """Answers went on: those of attempts that count."""
    dropped = []
    num_tokens = 0
    for row, (request, index, attempt, total) in enumerate(fact.rows):
        found = _find(state, request, index, attempt)
        if found is None:
            dropped.append(row)
            continue
        sequence, attempts = found
        before = sequence.num_output_tokens
        if total < max(before, 1):
            raise InvariantError(f"event {fact.s}: {sequence} has {before} tokens of output, and then {total}")
        _choose(state, sequence, attempts, attempt)
        if not before:
            _note_first_token(state, sequence, attempts)
        sequence.num_tokens = sequence.prompt_tokens + total
        num_tokens += total - before
    state.note(Relayed(s=state.next_seq, ts=state.now_ns, c=state.cause, num_tokens=num_tokens, dropped=dropped))


def forward_ended(state: CoreState, fact: ForwardEnded) -> None:
    """An answer is complete, and with it the sequence."""
    found = _find(state, fact.request, fact.index, fact.attempt)
    if found is None:
        return
    sequence, attempts = found
    if fact.num_tokens < sequence.num_output_tokens:
        raise InvariantError(f"event {fact.s}: {sequence} ends with {fact.num_tokens} tokens of output")
    _choose(state, sequence, attempts, fact.attempt)
    replica = state.replicas[sequence.replica]
    _capacity(replica).note_success(replica.num_sent)
    sequence.num_tokens = sequence.prompt_tokens + fact.num_tokens
    if fact.cached_tokens >= 0:
        sequence.cached_tokens = fact.cached_tokens
    finish(state, sequence, fact.reason, fact.num_tokens)


def forward_failed(state: CoreState, fact: ForwardFailed) -> None:
    """An attempt has failed. The sequence waits for the next one, or ends with an error."""
    found = _find(state, fact.request, fact.index, fact.attempt)
    if found is None:
        return
    sequence, attempts = found
    is_hedge = fact.attempt == attempts.hedge
    replica = state.replicas[attempts.hedge_replica if is_hedge else sequence.replica]
    if fact.kind in ("overloaded", "timeout"):
        _capacity(replica).note_queue(attempts.hedge_sent if is_hedge else attempts.sent, state.next_seq)
        replica.note_capacity()
    if is_hedge:
        end_hedge(state, attempts)
    elif attempts.hedge:
        _move_to_hedge(state, sequence, attempts)
    else:
        _retry_or_end(state, sequence, attempts, fact)


def lose_attempts(state: CoreState, replicaset: Replicaset) -> None:
    """The engine that sent all requests is gone. No server of the set is known to be up, and no attempt has failed.

    Each sequence may be sent again at once. Whether a server can go on from what was shown turns out then.
    """
    forwards = _forwards(replicaset)
    for replica in replicaset.replicas:
        if replica.up:
            _stop(state, replica)
    for identity, attempts in forwards.attempts.items():
        if not attempts.current:
            continue
        sequence = state.requests[identity.request].sequences[identity.index]
        attempts.lost += 1
        if attempts.hedge:
            attempts.lost += 1
            end_hedge(state, attempts)
        _wait_again(state, sequence, attempts, due_ns=state.now_ns)
        replicaset.unrouted[identity] = sequence


def _wait_again(state: CoreState, sequence: Sequence, attempts: Attempts, *, due_ns: int) -> None:
    """No attempt of a sequence is under way any more. It may be sent again from `due_ns` on."""
    replica = state.replicas[sequence.replica]
    replica.vacate(sequence)
    sequence.transition(State.WAITING)
    state.set_of(sequence).num_waiting += 1
    attempts.current = 0
    sequence.home = sequence.replica = -1
    state.touch(sequence)
    state.decide(
        RetrySet,
        request=sequence.request,
        index=sequence.index,
        replica=replica.index,
        attempt=attempts.number,
        due_ns=due_ns,
    )


def _retry_or_end(state: CoreState, sequence: Sequence, attempts: Attempts, fact: ForwardFailed) -> None:
    replicaset, replica = state.set_of(sequence), state.replicas[sequence.replica]
    forwards = _forwards(replicaset)
    is_alone = len(replicaset.tally.ups) == int(replica.up)
    asked_ns = fact.retry_after_ns if is_alone else 0
    due_ns = state.now_ns + asked_ns + _backoff_ns(forwards, sequence, attempts.num_failed)
    deadline_ns = sequence.arrival.scheduling.deadline_ns and _deadline_ns(sequence)
    has_tokens = sequence.num_output_tokens > 0
    if (
        fact.kind == "refused"
        or asked_ns > MOST_BACKOFF_NS
        or attempts.num_failed >= forwards.config.max_attempts
        or (has_tokens and not fact.can_continue)
        or (not has_tokens and 0 < deadline_ns <= due_ns)
        or not forwards.pay()
    ):
        finish(state, sequence, "error", sequence.num_output_tokens)
        return
    attempts.avoided, attempts.due_ns = replica.index, due_ns
    forwards.resting[sequence.id] = sequence
    heappush(state.retries, (due_ns, *sequence.id, attempts.number))
    _wait_again(state, sequence, attempts, due_ns=due_ns)


def _backoff_ns(forwards: Forwards, sequence: Sequence, num_failed: int) -> int:
    longest_ns = min(forwards.config.backoff_ns << min(num_failed - 1, 60), MOST_BACKOFF_NS)
    draw = combine((sequence.arrival.seed, sequence.index, num_failed)) % (_PPM // 2 + 1)
    return longest_ns * (_PPM - draw) // _PPM


def retries_due(state: CoreState, due_ns: int) -> None:
    """Sequences whose wait is over are offered to the router again; those near their deadline get a second attempt."""
    while state.retries and state.retries[0][0] <= due_ns:
        wanted_ns, request, index, attempt = heappop(state.retries)
        admitted = state.requests.get(request)
        if admitted is None:
            continue
        sequence = admitted.sequences[index]
        replicaset = state.set_of(sequence)
        forwards = _forwards(replicaset)
        attempts = forwards.attempts.get(sequence.id)
        if attempts is None or attempts.number != attempt:
            continue
        if sequence.id in forwards.resting and attempts.due_ns == wanted_ns:
            replicaset.unrouted[sequence.id] = forwards.resting.pop(sequence.id)
        elif attempts.current == attempt and not sequence.num_output_tokens:
            _hedge(state, sequence, attempts)


def _hedge(state: CoreState, sequence: Sequence, attempts: Attempts) -> None:
    """Send a sequence to a second server as well: the one with the least load that has room."""
    replicaset = state.set_of(sequence)
    others = [replicaset.replicas[index - replicaset.first] for index in replicaset.tally.ups]
    others = [each for each in others if each.index != sequence.replica and each.has_room()]
    if state.paused or not others or not _forwards(replicaset).pay():
        return
    replica = min(others, key=lambda each: (each.weigh(each.admitted_tokens), each.index))
    attempts.number += 1
    attempts.hedge, attempts.hedge_replica = attempts.number, replica.index
    attempts.hedge_sent, attempts.hedge_sent_ns = state.next_seq, state.now_ns
    _capacity(replica).num_hedges += 1
    replica.note_capacity()
    num_cached = replica.prefix_tokens(sequence, replica.config.block_size)
    _note_forward(state, replica, sequence, attempts, num_cached=num_cached, is_hedge=True)


def _choose(state: CoreState, sequence: Sequence, attempts: Attempts, attempt: int) -> None:
    """An attempt has answered: another one of the sequence is ended."""
    if not attempts.hedge:
        return
    loser = (sequence.replica, attempts.current)
    if attempt == attempts.hedge:
        _move_to_hedge(state, sequence, attempts)
    else:
        loser = (attempts.hedge_replica, attempts.hedge)
        end_hedge(state, attempts)
    state.decide(Withdrawn, request=sequence.request, index=sequence.index, replica=loser[0], attempt=loser[1])


def _move_to_hedge(state: CoreState, sequence: Sequence, attempts: Attempts) -> None:
    """The second attempt is the one that counts, and the sequence is resident there."""
    replica = state.replicas[attempts.hedge_replica]
    state.replicas[sequence.replica].vacate(sequence)
    sequence.transition(State.WAITING)
    fit = measure(replica, sequence)
    attempts.current, attempts.sent, attempts.sent_ns = attempts.hedge, attempts.hedge_sent, attempts.hedge_sent_ns
    end_hedge(state, attempts)
    replica.settle(sequence, [block for block, _ in fit.hits], fit.first_group, max(fit.num_lacking, 0))
    sequence.launched_tokens = sequence.prefill_tokens
    replica.finish_prefill(sequence)
    state.touch(sequence)


def _note_first_token(state: CoreState, sequence: Sequence, attempts: Attempts) -> None:
    """What a first token's time says of a server that does not say whether requests wait there."""
    replica = state.replicas[sequence.replica]
    capacity = _capacity(replica)
    num_tokens = sequence.prefill_tokens - sequence.cached_tokens
    if capacity.waiting < 0 and capacity.has_queued(state.now_ns - attempts.sent_ns, num_tokens):
        capacity.note_queue(attempts.sent, state.next_seq)
        replica.note_capacity()


def _find(state: CoreState, request: int, index: int, attempt: int) -> tuple[Sequence, Attempts] | None:
    """A sequence and its attempts, if that attempt is under way."""
    admitted = state.requests.get(request)
    if admitted is None or not 0 <= index < len(admitted.sequences):
        return None
    sequence = admitted.sequences[index]
    forwards = state.set_of(sequence).forwards
    attempts = None if forwards is None else forwards.attempts.get(SequenceId(request, index))
    if attempts is None or not attempt or attempt not in (attempts.current, attempts.hedge):
        return None
    return sequence, attempts


def _deadline_ns(sequence: Sequence) -> int:
    """The time by which its first token is due; 0: it has no deadline."""
    return sequence.view.deadline_ns and sequence.view.arrival_ns + sequence.view.deadline_ns


def _backend_of(state: CoreState, index: int) -> Replica:
    replica = replica_of(state, index)
    _capacity(replica)
    return replica


def _capacity(replica: Replica) -> BackendCapacity:
    if replica.capacity is None:
        raise InvariantError(f"replica {replica.index} is no other server")
    return replica.capacity


def _forwards(replicaset: Replicaset) -> Forwards:
    if replicaset.forwards is None:
        raise InvariantError(f"replicaset {replicaset.index} has no other servers")
    return replicaset.forwards
