"""Routing: new sequences, and those whose worker was lost, are offered to the router."""

from __future__ import annotations

from eventlm.core.plugin import ReplicaView, RequestView
from eventlm.core.plugin_calls import ask_router
from eventlm.core.sequence_manager import enqueue
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence
from eventlm.events import Routed


def route_new(state: CoreState, replicaset: Replicaset) -> None:
    """Offer sequences that have no home to the router, all of a request at once, once a worker is up."""
    if not replicaset.unrouted or not any(replica.up for replica in replicaset.replicas):
        return
    unrouted, replicaset.unrouted = replicaset.unrouted, {}
    by_request: dict[int, list[Sequence]] = {}
    for sequence in unrouted.values():
        by_request.setdefault(sequence.request, []).append(sequence)
    for request, sequences in by_request.items():
        question = RequestView(request, replicaset.num_routed, len(sequences), sequences[0].num_tokens)
        replicaset.num_routed += 1
        views = [view_of(replicaset, replica, sequences[0]) for replica in replicaset.replicas if replica.up]
        home = ask_router(state, replicaset, question, views)
        for sequence in sequences:
            sequence.home = -1 if home is None else home
            state.touch(sequence)
            enqueue(state, sequence)
        if home is not None:
            complete = len(sequences) == state.requests[request].arrival.n
            for index in [-1] if complete else [sequence.index for sequence in sequences]:
                state.decide(Routed, because=request, request=request, index=index, replica=home)


def view_of(replicaset: Replicaset, replica: Replica, sequence: Sequence) -> ReplicaView:
    """A replica as the router sees it that is asked about `sequence`."""
    reads_prefixes = replicaset.plugins.router.reads_prefixes
    return ReplicaView(
        index=replica.index,
        num_waiting=len(replica.queue),
        num_running=len(replica.running),
        waiting_tokens=replica.queue.num_tokens,
        admitted_tokens=replica.admitted_tokens,
        available_blocks=replica.pool.num_available,
        prefix_tokens=replica.prefix_tokens(sequence, replicaset.config.block_size) if reads_prefixes else 0,
    )
