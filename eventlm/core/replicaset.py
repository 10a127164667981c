"""Several replicas: who gets a request, in which order they plan, and what happens when a worker is lost."""

from __future__ import annotations

from eventlm.core.plugin import ReplicaView, RequestView
from eventlm.core.replica import Replica
from eventlm.core.residency import preempt
from eventlm.core.sequence import Sequence, State
from eventlm.core.sequence_manager import enqueue
from eventlm.core.state import CoreState
from eventlm.core.step_planner import RoundKeys, plan_step
from eventlm.events import PolicyFailed, Routed, WorkerUp


def worker_up(state: CoreState, fact: WorkerUp) -> None:
    """A worker with an empty cache is ready. One of an epoch that is not newer is a no-op."""
    replica = state.replicas[fact.replica]
    if replica.up or fact.epoch <= replica.epoch:
        return
    replica.up = True
    replica.epoch = fact.epoch


def worker_lost(state: CoreState, replica_index: int, epoch: int) -> None:
    """Cache and steps in flight are gone; the sequences wait for another worker with the tokens they have."""
    replica = state.replicas[replica_index]
    if not replica.up or epoch != replica.epoch:
        return
    homeless = [sequence for sequence in replica.lose_worker() if sequence.state is State.WAITING]
    for sequence in homeless:
        _clear_flight(state, sequence)
    residents = replica.running[:]
    for sequence in residents:
        _clear_flight(state, sequence)
        preempt(state, replica, sequence, "lost", None)
    queued = replica.queue.members[:]
    for sequence in queued:
        replica.queue.remove(sequence)
    replica.start_anew()
    for sequence in sorted(homeless + residents + queued, key=lambda s: (s.request, s.index)):
        sequence.home = -1
        sequence.replica = -1
        state.touch(sequence)
        state.unrouted.append(sequence)


def _clear_flight(state: CoreState, sequence: Sequence) -> None:
    sequence.in_flight = 0
    sequence.sampling_in_flight = 0
    sequence.pending = 0


def plan(state: CoreState) -> None:
    """Rounds of one step a replica, fewest admitted tokens first, until all have their steps or nobody can run."""
    if state.paused:
        return
    _route_new(state)
    while True:
        ready = [
            replica
            for replica in state.replicas
            if replica.up and len(replica.in_flight) < state.config.max_steps_in_flight
        ]
        if not ready:
            return
        round_keys = _read_keys(state)
        progressed = False
        for replica in sorted(ready, key=lambda r: (r.admitted_tokens, r.index)):
            if plan_step(state, replica, round_keys):
                progressed = True
        if not progressed:
            return


def _read_keys(state: CoreState) -> RoundKeys:
    """One call of a policy that is not static, over all that wait and all partial prefills."""
    if state.policy.static:
        return {}
    queues = [state.shared_queue, *(replica.queue for replica in state.replicas)]
    views = [view for queue in queues for view in queue.views]
    partials = [
        sequence
        for replica in state.replicas
        if replica.num_partial
        for sequence in replica.running
        if sequence.state is State.PREFILL
    ]
    keys = state.keys_for(views + [sequence.view for sequence in partials])
    place = 0
    for queue in queues:
        queue.order_by(keys[place : place + len(queue)])
        place += len(queue)
    return {(s.request, s.index): key for s, key in zip(partials, keys[place:], strict=True)}


def _route_new(state: CoreState) -> None:
    """Offer sequences that have no home to the router, all of a request at once, once a worker is up."""
    if not state.unrouted or not any(replica.up for replica in state.replicas):
        return
    unrouted, state.unrouted = state.unrouted, []
    by_request: dict[int, list[Sequence]] = {}
    for sequence in unrouted:
        by_request.setdefault(sequence.request, []).append(sequence)
    for request, sequences in by_request.items():
        home = _ask_router(state, request, sequences)
        for sequence in sequences:
            sequence.home = -1 if home is None else home
            state.touch(sequence)
            enqueue(state, sequence)
        if home is not None:
            complete = len(sequences) == state.requests[request].arrival.n
            for index in [-1] if complete else [sequence.index for sequence in sequences]:
                state.decide(Routed, because=request, request=request, index=index, replica=home)


def _ask_router(state: CoreState, request: int, sequences: list[Sequence]) -> int | None:
    """The router's answer if it makes sense; else whoever has room."""
    views = [view_of(replica) for replica in state.replicas if replica.up]
    question = RequestView(
        request=request,
        ordinal=state.num_routed,
        num_sequences=len(sequences),
        num_tokens=sequences[0].total,
    )
    state.num_routed += 1
    try:
        home = state.plugins.router.route(question, views)
        if home is None or (type(home) is int and any(view.index == home for view in views)):
            return home
        error = "the router answered something else than the index of a replica that is up"
    except Exception as raised:  # a plug-in may raise anything; it must not stop the engine
        error = f"the router raised {type(raised).__name__}"
    state.decide(PolicyFailed, error=error)
    return None


def view_of(replica: Replica) -> ReplicaView:
    """A replica as its router sees it."""
    return ReplicaView(
        index=replica.index,
        num_waiting=len(replica.queue),
        num_running=len(replica.running),
        waiting_tokens=replica.queue.num_tokens,
        admitted_tokens=replica.admitted_tokens,
        available_blocks=replica.pool.num_available,
    )
