"""A replicaset: the replicas that serve one model, with its limits, plug-ins and predictor, and what waits for them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, Struct

from eventlm.config import CoreConfig
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import Predictor
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.state_pool import StatePool
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
        reads_prefixes = plugins.router.reads_prefixes
        self.replicas = [
            Replica(first + i, config, replicaset=index, states=_state_pool(config), reads_prefixes=reads_prefixes)
            for i in range(config.num_replicas)
        ]
        #: Sequences that any replica may take, and those that have not been offered to the router.
        self.shared_queue = WaitingQueue()
        self.queues = [self.shared_queue, *(replica.queue for replica in self.replicas)]
        self.unrouted: dict[SequenceId, Sequence] = {}
        self.num_routed = 0
        #: Live sequences that may have killed their workers, in the order in which they were first suspected.
        self.suspects: dict[SequenceId, Suspect] = {}
        self.losses = LossCounts()
        self.num_closing = 0
        #: All WAITING and WAITING_FOR_GRAMMAR sequences, wherever they are.
        self.num_waiting = 0

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """The queue that a waiting sequence belongs in."""
        return self.shared_queue if sequence.home < 0 else self.replicas[sequence.home - self.first].queue

    def prefill_ns(self, num_tokens: int, done_tokens: int = 0) -> int:
        """Predicted time to prefill what is left of `num_tokens` alone, in steps that are full."""
        config = self.config
        return self.predictor.prefill_ns(num_tokens, done_tokens, config.max_num_batched_tokens, config.stages)


def _state_pool(config: CoreConfig) -> StatePool | None:
    slots = config.state_slots
    return None if slots is UNSET else StatePool(slots, config.max_residents)
