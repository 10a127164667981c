"""What a replica holds after each drain, and why the most urgent sequence that waits for it has to wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import get_args

from eventlm.core.scheduler import waiting_head
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.core.state.step_plan import StepPlan, WaitCause
from eventlm.core.wait_reason import find_wait_reason
from eventlm.events import Admitted, Decision, Fact, GrammarReady, Preempted
from eventlm.metrics.store import MetricsStore
from eventlm.replay.index.tables import DRAINS, GAUGES, GrowingTable
from eventlm.types import SequenceId

#: The causes that `head_cause` counts.
WAIT_CAUSES: tuple[str, ...] = get_args(WaitCause)
_CAUSES = {cause: number for number, cause in enumerate(WAIT_CAUSES)}
#: cause, request, index, lacking blocks.
_Head = tuple[int, int, int, int]
_NOBODY: _Head = (-1, -1, -1, 0)
_UNKNOWN = -1
#: As `head_cause`: the plan that left it out lies before what was read.
UNSEEN_CAUSE = -2


class GaugeSampler:
    """Samples a core, or where there is none the metrics, after each drain.

    servers: the replicas that are other servers, whose blocks are only a guess of what they have cached.
    """

    def __init__(self, servers: Collection[int] = ()) -> None:
        self._servers = servers
        self.drains = GrowingTable(DRAINS)
        self.gauges = GrowingTable(GAUGES)
        self._latest: dict[int, tuple[int, ...]] = {}
        #: By replica, its latest plan and the drain that made it.
        self._plans: dict[int, tuple[StepPlan, int]] = {}
        #: The drain since which a sequence has been waiting, if it was seen.
        self._since: dict[SequenceId, int] = {}
        #: Sequences that were preempted with rows in flight.
        self._draining: dict[SequenceId, Sequence] = {}
        #: By replica, the latest answer, with what it depends on besides the plans.
        self._heads: dict[int, tuple[tuple[object, ...], _Head]] = {}

    def note(self, state: CoreState, fact: Fact, decisions: Iterable[Decision]) -> None:
        """A fact was applied: note who began to wait."""
        drain = len(self.drains)
        if isinstance(fact, GrammarReady):
            self._restart(state, fact.request, drain)
        for decision in decisions:
            if isinstance(decision, Admitted):
                self._restart(state, decision.request, drain)
            elif isinstance(decision, Preempted) and decision.request in state.requests:
                sequence = state.requests[decision.request].sequences[decision.index]
                self._since[sequence.id] = drain
                if sequence.in_flight:
                    self._draining[sequence.id] = sequence

    def _restart(self, state: CoreState, request: int, drain: int) -> None:
        found = state.requests.get(request)
        for sequence in found.sequences if found is not None else ():
            self._since[sequence.id] = drain

    def sample(self, state: CoreState, s: int, num_live: int) -> None:
        """A drain is over; `s` is its last fact."""
        drain = self.drains.add(s, state.next_seq, state.now_ns, state.num_waiting, num_live)
        for identity, sequence in list(self._draining.items()):
            if not sequence.in_flight:
                self._since[identity] = drain
                del self._draining[identity]
        for index, plan in state.plans.items():
            self._plans[index] = (plan, drain)
        for replica in state.replicas:
            self._sample(state, replica, drain)
        if len(self._since) > 2 * num_live + 1024:
            self._since = {
                identity: since for identity, since in self._since.items() if identity.request in state.requests
            }

    def _sample(self, state: CoreState, replica: Replica, drain: int) -> None:
        queue, shared = replica.queue.members, state.set_of(replica).shared_queue.members
        pool = replica.pool
        oldest = min(queue[:1] + shared[:1], key=lambda each: each.id, default=None)
        blocks = (pool.num_available - pool.num_idle, pool.num_blocks - pool.num_available, pool.num_idle)
        num_partial = replica.num_partial
        if replica.index in self._servers:
            num_partial, blocks = _UNKNOWN, (_UNKNOWN, _UNKNOWN, _UNKNOWN)
        row = (
            replica.index,
            len(queue) + len(shared),
            len(replica.running),
            num_partial,
            *blocks,
            len(replica.in_flight),
            _UNKNOWN if oldest is None else oldest.arrival.ts,
            *self._head(state, replica, drain),
        )
        if self._latest.get(replica.index) != row:
            self._latest[replica.index] = row
            self.gauges.add(drain, *row)

    def _head(self, state: CoreState, replica: Replica, drain: int) -> _Head:
        head = waiting_head(state, replica)
        if head is None:
            self._heads.pop(replica.index, None)
            return _NOBODY
        sequence = head.sequence
        depends_on = (sequence.id, sequence.num_tickets, state.paused, [each.up for each in state.replicas])
        before = self._heads.get(replica.index)
        is_planned = bool(state.plans) or replica.index in self._servers
        if before is not None and before[0] == depends_on and not is_planned:
            return before[1]
        since = self._since.get(sequence.id, -1)
        plans = {index: plan for index, (plan, made) in self._plans.items() if made >= since}
        reason = find_wait_reason(state, sequence, plans)
        found = _NOBODY
        if reason is not None:
            cause = _CAUSES[reason.cause]
            if reason.cause == "steps_in_flight" and since < 0 and reason.replica not in plans:
                cause = UNSEEN_CAUSE
            found = (cause, sequence.request, sequence.index, reason.num_lacking)
        self._heads[replica.index] = (depends_on, found)
        return found

    def forget(self) -> None:
        """The log goes on after a gap."""
        self._plans.clear()
        self._since.clear()
        self._draining.clear()
        self._heads.clear()

    def sample_metrics(self, store: MetricsStore, *, s: int, next_s: int, ts: int, num_live: int) -> None:
        """The same from the metrics of a log that is not verified, as far as they go."""
        gauges = store.gauges
        drain = self.drains.add(s, next_s, ts, sum(each.num_waiting for each in gauges), num_live)
        for index, each in enumerate(gauges):
            num_held = _UNKNOWN if index in self._servers else each.num_held_blocks
            known = (each.num_waiting, each.num_running, _UNKNOWN, _UNKNOWN, num_held)
            row = (index, *known, _UNKNOWN, _UNKNOWN, _UNKNOWN, *_NOBODY)
            if self._latest.get(index) != row:
                self._latest[index] = row
                self.gauges.add(drain, *row)
