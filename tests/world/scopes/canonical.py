"""When two states are the same: a digest of everything that decides what happens next, and of nothing else.

Left out, with the reason why it decides nothing:

* **Numbers of events and requests.** Requests are named by their place in the order of arrival, which is what breaks
  ties. So requests of one kind that have not come are interchangeable, and so are those that have ended.
* **Times** within an epoch (see `tests.world.scopes.world`): only the epoch of a time counts. Arrivals are in order, so
  the keys of a static policy follow from kind, epoch and place. Keys of other policies count as they are, since they
  are differences of times.
* **Numbers of blocks.** A block is known by its name; a held block without one is in a single table; free blocks are
  only counted. Which free block is taken decides nothing.
* **Epochs and steps of workers, and what workers must forget**: these are only compared for equality, or passed on.
* **Rows of ended sequences in flight**, except that they are there: their tokens are dropped.
* **How many steps completed and workers were lost** (`LossCounts`, except for losses in a row). These matter only at
  odds of 100,000 to 1, which so few losses and steps do not reach.
* **What is looked up again** before it is used: paths in the cache, keys of a round, loads, plans.

What could be computed from the rest (counts, the order of residents, whose turn is due) is included all the same: if it
is wrong, the state is a different one, and is checked.

Replicas keep their numbers: of equal replicas, the lower one has its turn first, so a state and its mirror image do not
go on alike.

The digest is checked too: for some states that were found twice, both copies are expanded, and must lead to the same
states (see `tests.world.scopes.search`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import xxhash
from msgspec import msgpack

from eventlm.core.state.backend_state import BackendCapacity, Forwards
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Replicaset
from eventlm.core.state.sequence import Sequence, State
from eventlm.core.state.state_pool import StatePool
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.round_robin import RoundRobin
from eventlm.types import SequenceId
from tests.world.scopes.world import EPOCH_NS, World, is_near

_encode = msgpack.Encoder().encode
_read = attrgetter(
    "index",
    "state",
    "num_tokens",
    "prefill_tokens",
    "launched_tokens",
    "pending_tokens",
    "in_flight",
    "sampling_in_flight",
    "room_tokens",
    "num_tree_blocks",
    "replica",
    "home",
    "generation",
    "key_generation",
    "evictions",
    "skips",
    "cached_tokens",
    "closing_reason",
    "view.prompt_tokens",
    "view.done_tokens",
    "view.cached_tokens",
    "view.remaining_ns",
)
#: Routers that use replicas in turn.
_TAKES_TURNS = (RoundRobin, PrefixAffinity)
_ENDED = -1


def digest(world: World) -> int:
    """A 64-bit digest of everything that decides what can come next, and how."""
    state = world.core.state
    places: dict[SequenceId, int] = {}
    sequences: list[Any] = []
    for request in state.requests.values():
        arrival = request.arrival
        replicaset = state.replicasets[arrival.replicaset]
        policies = [*replicaset.plugins.policies.values()]
        sequences.append((arrival.seed, arrival.ts // EPOCH_NS, request.has_timer))
        for sequence in request.sequences:
            if sequence.state is State.FINISHED:
                sequences.append(_ENDED)
                continue
            places[sequence.id] = len(places)
            recoveries = state.recoveries.get(sequence.id)
            names = state.replicas[sequence.replica].pool._name
            sequences.append(
                (
                    _read(sequence),
                    min(sequence.residency, 2),
                    # Policies are swapped in a fixed order, so the generation gives the policy.
                    0 if policies[sequence.generation % len(policies)].static else sequence.urgency[1],
                    sequence.ticket != 0,
                    len(sequence.block_names),
                    [names[block] for block in sequence.block_table],
                    sequence.block_table[0] // state.replicas[0].pool.blocks_per_group if sequence.block_table else 0,
                    sequence.id in replicaset.partial_keys,
                    # After a further token they begin anew.
                    recoveries.in_a_row if recoveries and recoveries.num_tokens == sequence.num_tokens else 0,
                )
            )
    parts: list[Any] = [
        world.left,
        list(world.chances.values()),
        state.drain_open,
        len(state.group),
        state.paused,
        state.now_ns // EPOCH_NS,
        sequences,
        [_of_set(world, replicaset, places) for replicaset in state.replicasets],
        [_of_replica(replica, places) for replica in state.replicas],
        _of_timers(world),
    ]
    if state.retries:
        parts.append(_of_retries(world, places))
    return xxhash.xxh3_64_intdigest(_encode(parts))


def _of_set(world: World, replicaset: Replicaset, places: dict[SequenceId, int]) -> Any:
    turns = isinstance(replicaset.plugins.router, _TAKES_TURNS)
    prefixes = replicaset.prefixes
    due, tally = replicaset._turns, replicaset.tally
    return (
        replicaset.policy_name,
        replicaset.policy_generation,
        replicaset.predictor.base_ps,
        replicaset.num_routed % len(replicaset.replicas) if turns else 0,
        [places[identity] for identity in replicaset.unrouted],
        [(places[identity], *suspect) for identity, suspect in replicaset.suspects.items()],
        replicaset.losses.in_a_row,
        replicaset.num_waiting,
        replicaset.num_closing,
        replicaset._num_changes == replicaset._num_seen,
        due._with_room,
        list(due._standing),
        list(tally.changed),
        tally.ups,
        tally.num_running,
        None if prefixes is None else (sorted(prefixes.held.items()), sorted(prefixes.awaited.items())),
        None if replicaset.forwards is None else _of_forwards(world, replicaset.forwards, places),
    )


def _of_replica(replica: Replica, places: dict[SequenceId, int]) -> Any:
    pool = replica.pool
    ended: dict[SequenceId, int] = {}

    def place(sequence: Sequence) -> int:
        found = places.get(sequence.id)
        # For ended sequences, it matters only which ones are the same.
        return ended.setdefault(sequence.id, _ENDED - len(ended)) if found is None else found

    return (
        replica.up,
        [places[sequence.id] for sequence in replica.running],
        [places[sequence.id] for sequence in replica.queue.members],
        replica.num_partial,
        replica.admitted_tokens,
        [
            (
                [place(sequence) for sequence in step.decodes],
                [(place(row.sequence), row.start, row.end, row.final) for row in step.chunks],
                step.most,
            )
            for step in replica.in_flight
        ],
        list(map(len, pool._free)),
        [[pool._name[block] for block in idle] for idle in pool._idle],
        sum(pool.references),
        len(pool.tree),
        sorted(replica.awaited.items()),
        None if replica.capacity is None else _of_capacity(replica.capacity),
        None if replica.states is None else _of_states(replica.states, places),
    )


def _of_capacity(capacity: BackendCapacity) -> Any:
    return (
        capacity.limit_milli,
        capacity.num_hedges,
        capacity.is_doubling,
        capacity.ns_per_token // EPOCH_NS,
        capacity.running,
        capacity.waiting,
    )


def _of_states(states: StatePool, places: dict[SequenceId, int]) -> Any:
    """Each slot is named by its content."""
    names = {slot: name for name, slot in states._copies.items()}
    residents = [
        (
            places[SequenceId(*identity)],
            names.get(each.source, each.source == each.slot),
            each.is_new,
            each.promised and each.promised[0],
        )
        for identity, each in states._residents.items()
    ]
    pins = sorted((names[slot], count) for slot, count in states._pins.items())
    return len(states._free), [*states._copies], sorted(residents), pins, states._num_promised


def _of_forwards(world: World, forwards: Forwards, places: dict[SequenceId, int]) -> Any:
    state = world.core.state
    decreased = [replica.capacity.decreased_at if replica.capacity else 0 for replica in state.replicas]
    attempts = [
        (
            places[identity],
            each.number,
            each.current,
            each.sent_ns // EPOCH_NS,
            # Attempts that were sent before the last decrease prove nothing new.
            each.current and each.sent > decreased[state.requests[identity.request].sequences[identity.index].replica],
            each.hedge,
            each.hedge_replica if each.hedge else -1,
            each.hedge and (each.hedge_sent_ns // EPOCH_NS, each.hedge_sent > decreased[each.hedge_replica]),
            each.avoided,
            each.lost,
        )
        for identity, each in forwards.attempts.items()
    ]
    return attempts, [places[identity] for identity in forwards.resting], forwards.balance_ppm


def _of_timers(world: World) -> Any:
    """All timers, in the order in which they are due; timers of ended requests fire too."""
    state = world.core.state
    order = {request: place for place, request in enumerate(state.requests)}
    return [(*_due(due_ns, state.now_ns), order.get(request, _ENDED)) for due_ns, request in sorted(state.timers)]


def _of_retries(world: World, places: dict[SequenceId, int]) -> Any:
    """All retries, in the order in which they are due."""
    state = world.core.state
    return [
        (*_due(due_ns, state.now_ns), places.get(SequenceId(request, index), _ENDED), attempt)
        for due_ns, request, index, attempt in sorted(state.retries)
    ]


def _due(due_ns: int, now_ns: int) -> tuple[int, bool]:
    return due_ns // EPOCH_NS, is_near(due_ns, now_ns)
