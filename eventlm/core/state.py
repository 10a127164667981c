"""The state of an engine, and the one way in which decisions come into being."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, TypeVar

from msgspec import Struct

from eventlm.config import CoreConfig
from eventlm.core.digest import combine, to_hex, weight
from eventlm.core.plugin import Batcher, Policy, Router, SequenceView
from eventlm.core.predictor import Predictor
from eventlm.core.replica import Replica
from eventlm.core.sequence import Request, Sequence, State
from eventlm.core.waiting_queue import WaitingQueue
from eventlm.events import Arrived, Decision, PolicyFailed

D = TypeVar("D", bound=Decision)


class Plugins(Struct, frozen=True, kw_only=True):
    """What was installed at start. `policies` by the name that a `policy` fact uses; `policy` is the first in force."""

    policies: dict[str, Policy]
    policy: str
    batcher: Batcher
    router: Router


class CoreState:
    """Everything that decides what happens next. Only the functions of this package change it."""

    def __init__(self, config: CoreConfig, plugins: Plugins, predictor: Predictor) -> None:
        self.config = config
        self.plugins = plugins
        self.policy_name = plugins.policy
        self.policy = plugins.policies[plugins.policy]
        self.predictor = predictor
        #: Position of the next event, its time, and the event that is being applied.
        self.next_seq = 0
        self.now_ns = 0
        self.cause = 0
        self.decisions: list[Decision] = []
        self.paused = False
        self.requests: dict[int, Request] = {}
        #: Members of a group that is not complete yet.
        self.group: list[Arrived] = []
        static = self.policy.static
        self.replicas = [Replica(i, config.num_blocks, static=static) for i in range(config.num_replicas)]
        #: Sequences that any replica may take, and those that have not been offered to the router.
        self.shared_queue = WaitingQueue(static=static)
        self.unrouted: list[Sequence] = []
        self.num_routed = 0
        #: All WAITING and HELD sequences, wherever they are.
        self.num_waiting = 0
        #: (due_ns, request), earliest first.
        self.timers: list[tuple[int, int]] = []
        self.timers_digest = 0
        #: Hash over the seeds of all requests so far.
        self.rng_digest = 0
        #: Sequences whose share of the digest is to be computed again, and the sum of all shares.
        self.touched: dict[tuple[int, int], Sequence] = {}
        self.sequences_digest = 0

    def decide(self, kind: type[D], /, *, because: int | None = None, **fields: Any) -> D:
        """Stamp a decision. Its cause is the fact being applied, or `because`."""
        cause = self.cause if because is None else because
        decision = kind(s=self.next_seq, ts=self.now_ns, c=cause, **fields)
        self.next_seq += 1
        self.decisions.append(decision)
        return decision

    def keys_for(self, views: list[SequenceView]) -> list[int]:
        """Ask the policy for keys. One that raises or returns nonsense is reported, and the arrival counts instead."""
        if not views:
            return []
        try:
            keys = self.policy.keys(views, self.now_ns)
            if len(keys) == len(views) and set(map(type, keys)) == {int}:
                return list(keys)
            error = f"{self.policy_name} returned something else than {len(views)} integers"
        except Exception as raised:  # a plug-in may raise anything; it must not stop the engine
            error = f"{self.policy_name} raised {type(raised).__name__}"
        self.decide(PolicyFailed, error=error)
        return [view.arrival_ns for view in views]

    def eviction_margin(self) -> int | None:
        """The policy's margin; none if it cannot say."""
        try:
            margin = self.policy.eviction_margin()
        except Exception as raised:  # as above
            self.decide(PolicyFailed, error=f"{self.policy_name} raised {type(raised).__name__} on its margin")
            return None
        return margin if type(margin) is int else None

    def touch(self, sequence: Sequence) -> None:
        """Note that a sequence's share of the digest has changed."""
        self.touched[(sequence.request, sequence.index)] = sequence

    def add_timer(self, due_ns: int, request: int) -> None:
        """Put a timer on the heap."""
        heappush(self.timers, (due_ns, request))
        self.timers_digest += weight(due_ns) ^ weight(request)

    def pop_timers(self, due_ns: int) -> list[int]:
        """Take all timers up to `due_ns` off the heap; their requests in order of time."""
        requests = []
        while self.timers and self.timers[0][0] <= due_ns:
            due, request = heappop(self.timers)
            self.timers_digest -= weight(due) ^ weight(request)
            requests.append(request)
        return requests

    def digests(self) -> dict[str, str]:
        """16 hex digits for each component. Costs what has changed since the last call, plus the residents."""
        for replica in self.replicas:
            for sequence in replica.running:
                self.touch(sequence)
        for sequence in self.touched.values():
            share = sequence_share(sequence)
            self.sequences_digest += share - sequence.contribution
            sequence.contribution = share
        self.touched.clear()
        queues = [self.shared_queue.digest, *(replica.queue.digest for replica in self.replicas)]
        waiting = [(s.request, s.index) for s in self.unrouted]
        return {
            "queue": to_hex(combine([*map(to_hex, queues), waiting, self.num_waiting, self.num_routed])),
            "sequences": to_hex(self.sequences_digest),
            "blocks": to_hex(combine(to_hex(replica.pool.digest) for replica in self.replicas)),
            "timers": to_hex(self.timers_digest),
            "policy": to_hex(combine([self.policy_name, *self.predictor.coefficients(), self.paused])),
            "rng": to_hex(self.rng_digest),
        }


def sequence_share(sequence: Sequence) -> int:
    """A sequence's share of the digest, computed from its present state; 0 once it has ended."""
    s = sequence
    if s.state is State.FINISHED:
        return 0
    if s.state is State.CLOSING:
        # Rows still in flight for it change nothing any more.
        return combine((s.request, s.index, s.state.value, s.total))
    return combine(
        (
            s.request,
            s.index,
            s.state.value,
            s.replica,
            s.home,
            s.total,
            s.launched,
            s.pending,
            s.in_flight,
            s.residency,
            s.evictions,
            s.skips,
            len(s.names),
            s.num_tree_blocks,
            s.urgency[1],
        )
    )
