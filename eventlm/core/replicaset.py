"""Several replicas: who gets a request, in which order they plan, and what happens when a worker is lost."""

from __future__ import annotations

from eventlm.core.plugin import ReplicaView, RequestView
from eventlm.core.plugin_calls import ask_margin, ask_policy, ask_router
from eventlm.core.poison_requests import accuse
from eventlm.core.replica import Replica
from eventlm.core.residency import preempt
from eventlm.core.sequence import Sequence, State
from eventlm.core.sequence_manager import enqueue, finish
from eventlm.core.state import CoreState, replica_of
from eventlm.core.step_planner import plan_step
from eventlm.errors import InvariantError
from eventlm.events import CacheFlushed, Desynced, PolicySwapped, Preempted, Routed, WorkerLost, WorkerUp


def worker_up(state: CoreState, fact: WorkerUp) -> None:
    """A worker with an empty cache is ready; the one before it, if its loss has not been said, is gone.

    One of an epoch that is not newer than any heard of is a no-op.
    """
    replica = replica_of(state, fact.replica)
    if fact.epoch <= replica.epoch:
        return
    if replica.up:
        _lose(state, replica, crashed=False)
    replica.up = True
    replica.epoch = fact.epoch


def worker_lost(state: CoreState, fact: WorkerLost | Desynced) -> None:
    """Cache and steps in flight are gone; the sequences wait for another worker with the tokens they have.

    Those that are found to kill their workers end (see `eventlm.core.poison_requests`).
    The loss of an older worker is a no-op; that of one never heard of is remembered, so that it cannot come up.
    """
    replica = replica_of(state, fact.replica)
    if fact.epoch < replica.epoch:
        return
    replica.epoch = fact.epoch
    if replica.up:
        _lose(state, replica, crashed=isinstance(fact, WorkerLost) and fact.crashed)


def _lose(state: CoreState, replica: Replica, *, crashed: bool) -> None:
    condemned = accuse(state, replica, crashed=crashed) if replica.in_flight else []
    homeless = [sequence for sequence in replica.lose_worker() if sequence.state is State.WAITING]
    for sequence in homeless:
        _clear_flight(sequence)
    residents = replica.running[:]
    for sequence in residents:
        _clear_flight(sequence)
        preempt(state, replica, sequence, "lost", None)
    queued = replica.queue.members[:]
    for sequence in queued:
        replica.queue.remove(sequence)
    replica.start_anew()
    for sequence in sorted(homeless + residents + queued, key=lambda s: s.id):
        sequence.home = -1
        sequence.replica = -1
        state.touch(sequence)
        state.unrouted[sequence.id] = sequence
    for sequence in condemned:
        finish(state, sequence, "error", sequence.num_output_tokens)


def _clear_flight(sequence: Sequence) -> None:
    sequence.in_flight = 0
    sequence.sampling_in_flight = 0
    sequence.pending_tokens = 0


def plan(state: CoreState) -> None:
    """Rounds of one step a replica, fewest admitted tokens first, until all have their steps or nobody can run."""
    if state.paused:
        return
    _route_new(state)
    state.margin = ask_margin(state) if state.num_waiting else None
    while ready := [replica for replica in state.replicas if replica.up and replica.has_room(state.config)]:
        if not state.policy.static:
            _read_keys(state)
        if len(ready) > 1:
            ready.sort(key=_turn)
        num_decided = len(state.decisions)
        launched = [plan_step(state, replica) for replica in ready]
        # Who had to give way on one replica may run on another whose turn was over by then.
        if not any(launched) and not _has_preempted(state, num_decided):
            return


def _has_preempted(state: CoreState, num_before: int) -> bool:
    """Whether anybody was preempted since so many decisions. Without a launch that ends: only decodes give way to
    memory, and an eviction at admission counts against its victim until its next token.
    """
    return any(isinstance(decision, Preempted) for decision in state.decisions[num_before:])


def _turn(replica: Replica) -> tuple[int, int]:
    return replica.admitted_tokens, replica.index


def _read_keys(state: CoreState) -> None:
    """One call of a policy that is not static, over all that wait and all partial prefills."""
    if state.policy.reads_prefixes:
        _read_prefixes(state)
    waiting = [sequence for queue in state.queues for sequence in queue.members]
    partials = [sequence for replica in state.replicas for sequence in replica.partials()]
    keys, state.round_generation = ask_policy(state, [sequence.view for sequence in waiting + partials])
    place = 0
    for queue in state.queues:
        queue.order_by(keys[place : place + len(queue)])
        place += len(queue)
    state.partial_keys = {sequence.id: key for sequence, key in zip(partials, keys[place:], strict=True)}


def _read_prefixes(state: CoreState) -> None:
    """What each waiting sequence could hit now: at home, or the most that any replica has."""
    for queue in state.queues:
        for sequence in queue.members:
            sequence.view.cached_tokens = 0
    for replica in state.replicas:
        if replica.up:
            replica.read_hits(replica.queue.members + state.shared_queue.members, state.config.block_size)


def swap_policy(state: CoreState, fact: PolicySwapped) -> None:
    """Another policy orders all that wait and the partial prefills; decodes keep the urgency of their admission."""
    policy = state.plugins.policies.get(fact.name)
    if policy is None:
        raise InvariantError(f"policy {fact.name!r} was not installed at start")
    state.policy_name, state.policy = fact.name, policy
    state.policy_generation += 1
    state.partial_keys = {}
    partials = [sequence for replica in state.replicas for sequence in replica.partials()]
    if policy.static:
        keys, _ = ask_policy(state, [sequence.view for sequence in partials])
        state.partial_keys = {sequence.id: key for sequence, key in zip(partials, keys, strict=True)}
    for queue in state.queues:
        members = queue.members[:]
        for sequence in members:
            queue.remove(sequence)
        for sequence in members:
            enqueue(state, sequence)


def flush_caches(state: CoreState, fact: CacheFlushed) -> None:
    """Nobody hits any more what no sequence holds. Those that wait look up their hits anew when they are admitted."""
    for replica in state.replicas:
        replica.pool.flush()


def _route_new(state: CoreState) -> None:
    """Offer sequences that have no home to the router, all of a request at once, once a worker is up."""
    if not state.unrouted or not any(replica.up for replica in state.replicas):
        return
    unrouted, state.unrouted = state.unrouted, {}
    by_request: dict[int, list[Sequence]] = {}
    for sequence in unrouted.values():
        by_request.setdefault(sequence.request, []).append(sequence)
    for request, sequences in by_request.items():
        question = RequestView(request, state.num_routed, len(sequences), sequences[0].num_tokens)
        state.num_routed += 1
        views = [view_of(state, replica, sequences[0]) for replica in state.replicas if replica.up]
        home = ask_router(state, question, views)
        for sequence in sequences:
            sequence.home = -1 if home is None else home
            state.touch(sequence)
            enqueue(state, sequence)
        if home is not None:
            complete = len(sequences) == state.requests[request].arrival.n
            for index in [-1] if complete else [sequence.index for sequence in sequences]:
                state.decide(Routed, because=request, request=request, index=index, replica=home)


def view_of(state: CoreState, replica: Replica, sequence: Sequence) -> ReplicaView:
    """A replica as the router sees it that is asked about `sequence`."""
    reads_prefixes = state.plugins.router.reads_prefixes
    return ReplicaView(
        index=replica.index,
        num_waiting=len(replica.queue),
        num_running=len(replica.running),
        waiting_tokens=replica.queue.num_tokens,
        admitted_tokens=replica.admitted_tokens,
        available_blocks=replica.pool.num_available,
        prefix_tokens=replica.prefix_tokens(sequence, state.config.block_size) if reads_prefixes else 0,
    )
