"""The state of an engine, and the one way in which decisions come into being."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, TypeVar

from eventlm.config import CoreConfig
from eventlm.core.predictor import Predictor
from eventlm.core.state.digest import combine, to_hex, weight
from eventlm.core.state.plan_witness import PlanEntry
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Plugins, Replicaset, SetParts
from eventlm.core.state.sequence import AdmittedRequest, Sequence, State
from eventlm.core.state.step_plan import StepPlan
from eventlm.errors import InvariantError
from eventlm.events import Arrived, Decision
from eventlm.types import SequenceId

D = TypeVar("D", bound=Decision)


class Recoveries(NamedTuple):
    """How many recoveries in a row found a sequence without a new token; its tokens and its residency at the last."""

    in_a_row: int
    num_tokens: int
    residency: int


class CoreState:
    """Everything that decides what happens next. Only `eventlm.core` changes it."""

    def __init__(
        self, config: CoreConfig, plugins: Plugins, predictor: Predictor, others: Iterable[SetParts] = ()
    ) -> None:
        #: Of one model each; the first has the lowest replica numbers.
        self.replicasets: list[Replicaset] = []
        #: Those of all sets, by their number.
        self.replicas: list[Replica] = []
        for index, parts in enumerate([SetParts(config, plugins, predictor), *others]):
            replicaset = Replicaset(*parts, index=index, first=len(self.replicas))
            self.replicasets.append(replicaset)
            self.replicas += replicaset.replicas
        #: Position of the next event, its time, and the event that is being applied.
        self.next_seq = 0
        self.now_ns = 0
        self.cause = 0
        self.decisions: list[Decision] = []
        #: Of the latest drain, by replica: its latest plan. Nothing is decided by them.
        self.plans: dict[int, StepPlan] = {}
        #: By replica, its latest plan of any drain. Nothing is decided by them either.
        self.latest_plans: dict[int, StepPlan] = {}
        #: What plans look at is appended to it, unless it is None. Nothing is decided by it.
        self.witness: list[PlanEntry] | None = None
        self.paused = False
        #: Of several sets, the numbers of those that the facts of this drain are about.
        self.due: dict[int, None] = {}
        #: Facts of one drain share a time; only its last is marked.
        self.drain_open = False
        self.requests: dict[int, AdmittedRequest] = {}
        #: Of live sequences that the latest recovery found (see `eventlm.core.recovery`), or one before it.
        self.recoveries: dict[SequenceId, Recoveries] = {}
        #: Members of a group that is not complete yet.
        self.group: list[Arrived] = []
        #: (due_ns, request), earliest first.
        self.timers: list[tuple[int, int]] = []
        self.timers_digest = 0
        #: (due_ns, request, index, attempt), earliest first: when a sequence may be sent to another server, or must be
        #: sent to a second one. Void where the sequence has had a further attempt.
        self.retries: list[tuple[int, int, int, int]] = []
        #: Timers whose request has ended.
        self.num_dead_timers = 0
        #: Hash over the seeds of all requests so far.
        self.rng_digest = 0
        #: Sequences whose share of the digest is to be computed again, and the sum of all shares.
        self.touched: dict[SequenceId, Sequence] = {}
        self.sequences_digest = 0

    def set_of(self, member: Replica | Sequence) -> Replicaset:
        """The set that a replica or a sequence belongs to."""
        return self.replicasets[member.replicaset]

    def sets_meant(self, number: int) -> list[Replicaset]:
        """The sets that a fact is about: the one of that number, or with -1 all. Raises InvariantError if there is no
        such set.
        """
        if not -1 <= number < len(self.replicasets):
            raise InvariantError(f"event {self.cause} is about replicaset {number}, of {len(self.replicasets)}")
        return self.replicasets if number < 0 else [self.replicasets[number]]

    @property
    def policy_name(self) -> str:
        """The policy in force; where there are several sets each one's, in their order."""
        return ", ".join(replicaset.policy_name for replicaset in self.replicasets)

    @property
    def num_waiting(self) -> int:
        """All WAITING and WAITING_FOR_GRAMMAR sequences, of all sets."""
        return sum(replicaset.num_waiting for replicaset in self.replicasets)

    @property
    def num_closing(self) -> int:
        """Sequences of all sets whose end was seen and whose text is yet to be looked at."""
        return sum(replicaset.num_closing for replicaset in self.replicasets)

    def decide(self, kind: type[D], /, *, because: int | None = None, **fields: Any) -> D:
        """Stamp a decision. Its cause is the fact being applied, or `because`."""
        cause = self.cause if because is None else because
        return self.note(kind(s=self.next_seq, ts=self.now_ns, c=cause, **fields))

    def note(self, decision: D) -> D:
        """Take down a decision that is stamped. Only those of every step are stamped where they are made: a call by
        `**fields` takes a tenth of the time of a step.
        """
        self.next_seq += 1
        self.decisions.append(decision)
        return decision

    def touch(self, sequence: Sequence) -> None:
        """Note that a sequence's share of the digest has changed."""
        self.touched[sequence.id] = sequence

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: it has no share in the digest any more."""
        self.sequences_digest -= sequence.contribution
        sequence.contribution = 0
        self.touched.pop(sequence.id, None)
        self.recoveries.pop(sequence.id, None)

    def add_timer(self, due_ns: int, request: int) -> None:
        """Put a timer on the heap."""
        heappush(self.timers, (due_ns, request))
        self.timers_digest += timer_share(due_ns, request)

    def pop_timers(self, due_ns: int) -> list[int]:
        """Take all timers up to `due_ns` off the heap; those of their requests that live, in order of time."""
        requests = []
        while self.timers and self.timers[0][0] <= due_ns:
            due, request = heappop(self.timers)
            self.timers_digest -= timer_share(due, request)
            if request in self.requests:
                self.requests[request].has_timer = False
                requests.append(request)
            else:
                self.num_dead_timers -= 1
        return requests

    def bury_timer(self) -> None:
        """A request has ended before its timer. Once most timers are dead they are cleared away."""
        self.num_dead_timers += 1
        if self.num_dead_timers * 2 > len(self.timers) + 64:
            self.timers = [timer for timer in self.timers if timer[1] in self.requests]
            heapify(self.timers)
            self.timers_digest = sum(timer_share(*timer) for timer in self.timers)
            self.num_dead_timers = 0

    def add_up_sequences(self) -> None:
        """Bring their digest up to date. Costs what has changed since the last call, plus the residents."""
        for replica in self.replicas:
            for sequence in replica.running:
                self.touch(sequence)
        for sequence in self.touched.values():
            share = sequence_share(sequence)
            self.sequences_digest += share - sequence.contribution
            sequence.contribution = share
        self.touched.clear()

    def digests(self) -> dict[str, str]:
        """16 hex digits for each component. Costs what `add_up_sequences` does."""
        self.add_up_sequences()
        sets = self.replicasets
        queues = [to_hex(queue.digest) for each in sets for queue in each.queues]
        unrouted = [(request, index) for each in sets for request, index in each.unrouted]
        suspects = [(*identity, *suspect) for each in sets for identity, suspect in each.suspects.items()]
        counts = [count for each in sets for count in (each.num_waiting, each.num_routed)]
        losses = [repr(each.losses) for each in sets]
        states = [to_hex(replica.states.digest) for replica in self.replicas if replica.states is not None]
        policies = [
            value
            for each in sets
            for value in (each.policy_name, each.policy_generation, *each.predictor.coefficients())
        ]
        recoveries = [(*identity, *each) for identity, each in self.recoveries.items()]
        return {
            "queue": to_hex(combine([*queues, unrouted, suspects, *counts])),
            "sequences": to_hex(self.sequences_digest),
            "replicas": to_hex(combine([*(replica.summary() for replica in self.replicas), *losses])),
            "blocks": to_hex(combine(to_hex(replica.pool.digest) for replica in self.replicas)),
            # Traces of other models have no such digest. The same goes for those that follow.
            **({"states": to_hex(combine(states))} if states else {}),
            **({"forwards": self._forwards_digest()} if any(each.forwards is not None for each in sets) else {}),
            **({"recoveries": to_hex(combine(recoveries))} if recoveries else {}),
            "timers": to_hex(self.timers_digest),
            "policy": to_hex(combine([*policies, self.paused])),
            "rng": to_hex(self.rng_digest),
        }

    def _forwards_digest(self) -> str:
        forwards = [each.forwards.summary() for each in self.replicasets if each.forwards is not None]
        capacities = [repr(replica.capacity) for replica in self.replicas if replica.capacity is not None]
        return to_hex(combine([*forwards, *capacities, *sorted(self.retries)]))


def replica_of(state: CoreState, index: int) -> Replica:
    """The replica that a fact names. Raises InvariantError if there is none."""
    if not 0 <= index < len(state.replicas):
        raise InvariantError(f"there is no replica {index}, only {len(state.replicas)}")
    return state.replicas[index]


def timer_share(due_ns: int, request: int) -> int:
    """A timer's share of the digest."""
    return weight(weight(due_ns) + request)


def sequence_share(sequence: Sequence) -> int:
    """A sequence's share of the digest, computed from its present state; 0 once it has ended."""
    s = sequence
    if s.state is State.FINISHED:
        return 0
    if s.state is State.CLOSING:
        # Rows still in flight for it change nothing any more.
        return combine((s.request, s.index, s.state.value, s.num_tokens, s.closing_reason))
    flight = (s.in_flight, s.sampling_in_flight, s.pending_tokens, s.residency, s.evictions, s.skips, s.generation)
    blocks = (
        len(s.block_table),
        s.num_tree_blocks,
        s.shipped_blocks,
        len(s.block_names),
        s.block_names[-1] if s.block_names else 0,
    )
    lengths = (s.num_tokens, s.prefill_tokens, s.launched_tokens, s.cached_tokens)
    return combine((s.request, s.index, s.state.value, s.replica, s.home, *lengths, *flight, *blocks, *s.urgency))
