"""A replicaset: the replicas that serve one model, with its limits, plug-ins and predictor, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import UNSET, Struct

from eventlm.config import CoreConfig
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import Predictor
from eventlm.core.state.backend_state import BackendCapacity, Forwards
from eventlm.core.state.loads import Loads
from eventlm.core.state.prefix_index import PrefixIndex, bits_of
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.state_pool import StatePool
from eventlm.core.state.turns import Tally, Turns
from eventlm.core.state.waiting_queue import WaitingQueue
from eventlm.types import SequenceId


class Plugins(Struct, frozen=True, kw_only=True):
    """What was installed at start. `policies` by the name that a `policy` fact uses; `policy` is the first in force."""

    policies: dict[str, Policy]
    policy: str
    batcher: Batcher
    router: Router


class SetParts(NamedTuple):
    """What a replicaset is made of."""

    config: CoreConfig
    plugins: Plugins
    predictor: Predictor


class Suspect(NamedTuple):
    """What is held against a sequence: workers lost in a row while they computed its tokens from `start` to before
    `end`, and how many of them in a step of its own. Both are weighted (see `eventlm.core.poison_requests`).
    """

    losses: int
    losses_alone: int
    start: int
    end: int


class LossCounts(Struct):
    """How often steps have completed and workers been lost, lately; and losses since the last completed step."""

    num_steps: int = 0
    num_losses: int = 0
    in_a_row: int = 0


class Replicaset:
    """One model's replicas. index: which of the engine's sets it is. first: the number of its first replica; the
    numbers of an engine's replicas run across its sets.
    """

    def __init__(self, config: CoreConfig, plugins: Plugins, predictor: Predictor, *, index: int, first: int) -> None:
        self.config = config
        self.index = index
        self.first = first
        self.plugins = plugins
        self.policy_name = plugins.policy
        self.policy = plugins.policies[plugins.policy]
        #: Counts policy swaps: keys of one policy mean nothing to another.
        self.policy_generation = 0
        #: Keys of the present round, or under a static policy those that a swap asked for, of partial prefills.
        self.partial_keys: dict[SequenceId, int] = {}
        #: Generation of the keys of the present round, and the policy's margin in this plan.
        self.round_generation = 0
        self.margin: int | None = None
        self.predictor = predictor
        self.tally = Tally()
        self._turns = Turns()
        self._loads = Loads(first)
        has_readers = plugins.router.reads_prefixes or any(each.reads_prefixes for each in plugins.policies.values())
        #: None if no router or policy reads prefixes, or there is one replica.
        self.prefixes = PrefixIndex() if config.num_replicas > 1 and has_readers else None
        self.replicas = [
            Replica(
                first + i,
                config,
                replicaset=index,
                tally=self.tally,
                states=_state_pool(config),
                prefixes=self.prefixes,
                position=i,
                reads_prefixes=plugins.router.reads_prefixes,
                capacity=_capacity(config),
            )
            for i in range(config.num_replicas)
        ]
        #: Sequences that any replica may take, and those that have not been offered to the router.
        self.shared_queue = WaitingQueue()
        #: How often the shared queue has changed, and as of which change all replicas with room have looked at it.
        self._num_changes = 0
        self._num_seen = -1
        self.queues = [self.shared_queue, *(replica.queue for replica in self.replicas)]
        self.unrouted: dict[SequenceId, Sequence] = {}
        self.num_routed = 0
        #: Live sequences that may have killed their workers, in the order in which they were first suspected.
        self.suspects: dict[SequenceId, Suspect] = {}
        self.losses = LossCounts()
        #: Of a set of other servers.
        self.forwards = None if config.forwards is UNSET else Forwards(config.forwards)
        self.num_closing = 0
        #: All WAITING and WAITING_FOR_GRAMMAR sequences, wherever they are.
        self.num_waiting = 0

    def line_up(self, sequence: Sequence, key: int) -> None:
        """Put a waiting sequence in the line that it belongs in."""
        if sequence.home < 0:
            self.shared_queue.add(sequence, key)
            self._num_changes += 1
        else:
            self.replicas[sequence.home - self.first].line_up(sequence, key)

    def leave_line(self, sequence: Sequence) -> None:
        """Take a waiting sequence out of its line."""
        if sequence.home < 0:
            self.shared_queue.remove(sequence)
            self._num_changes += 1
        else:
            self.replicas[sequence.home - self.first].leave_line(sequence)

    def note_all(self) -> None:
        """Something has changed for all replicas."""
        for replica in self.replicas:
            self.tally.note(replica.index)

    def clear_suspect(self, identity: SequenceId) -> None:
        """A sequence is suspected no more. Whatever waited for its trial may run."""
        if self.suspects.pop(identity, None) is not None:
            self.note_all()

    def is_up(self, index: int) -> bool:
        """Whether the set has a replica of this number, with a worker."""
        return 0 <= index - self.first < len(self.replicas) and self.replicas[index - self.first].up

    @property
    def num_free_slots(self) -> int:
        """How many more sequences could be resident, as far as workers are up."""
        if self.forwards is not None:
            ups = [self.replicas[index - self.first] for index in self.tally.ups]
            return sum(max(each.capacity.limit - each.num_sent, 0) for each in ups if each.capacity is not None)
        return len(self.tally.ups) * self.config.max_residents - self.tally.num_running

    def begin_round(self, *, every: bool) -> bool:
        """Whether there is anybody to ask in a further round of a plan. every: all replicas with room for a step are to
        be asked.
        """
        if len(self.replicas) == 1:
            # To ask one replica costs less than to find out whether it must be asked.
            return self.replicas[0].up and self.replicas[0].has_room()
        turns, changed = self._turns, self.tally.changed
        is_static = self.policy.static
        for index in changed:
            replica = self.replicas[index - self.first]
            has_room = replica.up and replica.has_room()
            turns.update(
                index,
                (replica.weigh(replica.admitted_tokens), index) if has_room else None,
                stands=replica.num_partial > 0 or (not is_static and len(replica.queue) > 0),
            )
        self.tally.changed = {}
        turns.begin_round(changed)
        return turns.has_due or (turns.has_room and (every or self._concerns_all()))

    def _concerns_all(self) -> bool:
        """Whether every replica with room may have something to run: a suspect's trial, or what any may take."""
        if self.suspects:
            return True
        if not self.shared_queue.members:
            return False
        # Where a batcher held back what was taken from the shared queue, nothing was launched that would have made the
        # others look at it again.
        return not self.policy.static or self._num_changes != self._num_seen or self._turns.has_standing

    def resume(self) -> None:
        """Restore the state after a plan: no replica is due until something changes."""
        self.begin_round(every=False)
        self._num_seen = self._num_changes

    @property
    def standing(self) -> list[Replica]:
        """In a round, the replicas with room that have half-done prompts, or a line whose order depends on time."""
        if len(self.replicas) == 1:
            return self.replicas
        return [self.replicas[index - self.first] for index in self._turns.standing]

    def replicas_in_turn(self, *, every: bool) -> Iterable[Replica]:
        """Those that are to be asked in a round, each when its turn comes."""
        return self.replicas if len(self.replicas) == 1 else self._in_turn(every=every)

    def _in_turn(self, *, every: bool) -> Iterator[Replica]:
        num_changes = self._num_changes
        turn = self._turns.after((-1, -1), every=every or self._concerns_all())
        while turn is not None:
            yield self.replicas[turn[1] - self.first]
            turn = self._turns.after(turn, every=every or self._concerns_all())
        # A replica that takes from the shared queue changes it, so all look at it again.
        self._num_seen = num_changes

    def loads(self) -> Loads:
        """Of the replicas whose workers are up: admitted tokens, and those that wait in their own lines."""
        for index in self.tally.moved:
            replica = self.replicas[index - self.first]
            load = replica.weigh(replica.admitted_tokens + replica.queue.num_tokens)
            self._loads.set(index, load if replica.up else None)
        self.tally.moved = {}
        return self._loads

    def best_hit_tokens(self, sequence: Sequence) -> int:
        """The most leading tokens of a waiting sequence that any replica holds now."""
        block_size = self.config.block_size
        replicas = self.replicas
        if self.prefixes is not None:
            names = sequence.block_names
            holders = self.prefixes.held.get(names[0], 0) if names else 0
            replicas = [replicas[position] for position in bits_of(holders)]
        return max((replica.hit_tokens(sequence, block_size) for replica in replicas), default=0)

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """The queue that a waiting sequence belongs in."""
        return self.shared_queue if sequence.home < 0 else self.replicas[sequence.home - self.first].queue

    def prefill_ns(self, num_tokens: int, done_tokens: int = 0) -> int:
        """Predicted time to prefill what is left of `num_tokens` alone, in steps that are full."""
        config = self.config
        return self.predictor.prefill_ns(num_tokens, done_tokens, config.max_num_batched_tokens, config.stages)


def _capacity(config: CoreConfig) -> BackendCapacity | None:
    return (
        None if config.forwards is UNSET else BackendCapacity(config.max_num_seqs, 1000 * config.forwards.first_limit)
    )


def _state_pool(config: CoreConfig) -> StatePool | None:
    slots = config.state_slots
    return None if slots is UNSET else StatePool(slots, config.max_residents)
