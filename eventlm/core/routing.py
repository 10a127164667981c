"""Routing: new sequences, and those whose worker was lost, are offered to the router."""

from __future__ import annotations

from bisect import bisect_left
from typing import overload

from eventlm.core.plugin import ReplicaView, ReplicaViews, RequestView
from eventlm.core.plugin_calls import ask_router
from eventlm.core.rendezvous import rendezvous
from eventlm.core.sequence_manager import enqueue
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.prefix_index import bits_of
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence
from eventlm.events import Routed


def route_new(state: CoreState, replicaset: Replicaset) -> None:
    """Offer sequences that have no home to the router, all of a request at once, once a worker is up."""
    if not replicaset.unrouted or not replicaset.tally.ups:
        return
    unrouted, replicaset.unrouted = replicaset.unrouted, {}
    by_request: dict[int, list[Sequence]] = {}
    for sequence in unrouted.values():
        by_request.setdefault(sequence.request, []).append(sequence)
    for request, sequences in by_request.items():
        first = sequences[0]
        session = first.arrival.scheduling.session
        question = RequestView(request, replicaset.num_routed, len(sequences), first.num_tokens, session)
        replicaset.num_routed += 1
        home = ask_router(state, replicaset, question, UpReplicas(replicaset, first))
        if home is not None and replicaset.forwards is not None and _failed_there(replicaset, sequences, home):
            home = None
        for sequence in sequences:
            sequence.home = -1 if home is None else home
            state.touch(sequence)
            enqueue(state, sequence)
        if home is not None:
            complete = len(sequences) == state.requests[request].arrival.n
            for index in [-1] if complete else [sequence.index for sequence in sequences]:
                state.decide(Routed, because=request, request=request, index=index, replica=home)


def _failed_there(replicaset: Replicaset, sequences: list[Sequence], home: int) -> bool:
    """Whether an attempt of any of them has just failed on that server, and another one is up."""
    assert replicaset.forwards is not None
    attempts = replicaset.forwards.attempts
    return len(replicaset.tally.ups) > 1 and any(
        each.id in attempts and attempts[each.id].avoided == home for each in sequences
    )


def _weight_ppm(replica: Replica) -> int:
    return 1_000_000 if replica.capacity is None else replica.capacity.weight_ppm


class UpReplicas(ReplicaViews):
    """The replicas of a set whose workers are up, as a router sees them for one sequence."""

    def __init__(self, replicaset: Replicaset, sequence: Sequence) -> None:
        self._replicaset = replicaset
        self._sequence = sequence
        #: Their numbers, in order.
        self._ups = replicaset.tally.ups
        self._views: dict[int, ReplicaView] = {}
        #: How many leading blocks of the sequence may be hit; 0 if no router reads prefixes.
        self._num_blocks = 0
        if replicaset.plugins.router.reads_prefixes and not sequence.arrival.scheduling.skip_cache_read:
            self._num_blocks = sequence.max_hit_blocks(replicaset.config.block_size)

    def __len__(self) -> int:
        return len(self._ups)

    @overload
    def __getitem__(self, position: int) -> ReplicaView: ...

    @overload
    def __getitem__(self, position: slice) -> list[ReplicaView]: ...

    def __getitem__(self, position: int | slice) -> ReplicaView | list[ReplicaView]:
        numbers = self._ups[position]
        return self._view(numbers) if isinstance(numbers, int) else [self._view(number) for number in numbers]

    def _view(self, number: int) -> ReplicaView:
        view = self._views.get(number)
        if view is None:
            replicaset = self._replicaset
            replica = replicaset.replicas[number - replicaset.first]
            block_size = replicaset.config.block_size
            view = self._views[number] = ReplicaView(
                index=number,
                num_waiting=len(replica.queue),
                num_running=len(replica.running),
                waiting_tokens=replica.weigh(replica.queue.num_tokens),
                admitted_tokens=replica.weigh(replica.admitted_tokens),
                available_blocks=replica.pool.num_available,
                prefix_tokens=replica.prefix_tokens(self._sequence, block_size) if self._num_blocks else 0,
                limit=0 if replica.capacity is None else replica.capacity.limit,
                weight_ppm=_weight_ppm(replica),
            )
        return view

    def home_of(self, session: int) -> int:
        replicas, first = self._replicaset.replicas, self._replicaset.first
        return rendezvous(session, self._ups, [_weight_ppm(replicas[number - first]) for number in self._ups])

    def contenders(self, first: int) -> list[int]:
        replicaset, ups = self._replicaset, self._ups
        loads = replicaset.loads()
        start = ups[first % len(ups)]
        numbers = {loads.lightest(start): None}
        prefixes = replicaset.prefixes
        if self._num_blocks and prefixes is not None:
            names = self._sequence.block_names
            groups = prefixes.groups(names, self._num_blocks)
            lightest = [loads.lightest_of(group.replicas, start) for group in groups]
            if any(
                self._view(number).prefix_tokens != group.num_blocks * replicaset.config.block_size
                for number, group in zip(lightest, groups, strict=True)
            ):
                # The index knows names only. Names may be found below others than in this prompt, and recurrent layers
                # go on only where a copy of their state is kept.
                lightest = [replicaset.first + position for position in bits_of(prefixes.holders(names[0]))]
            numbers |= dict.fromkeys(lightest)
        return [bisect_left(ups, number) for number in numbers]
