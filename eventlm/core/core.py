"""The core as a state machine: `Core.apply(event)` is the only way in which its state changes.

Facts are applied in order; plans are made at the fact that carries the mark. Decisions and markers change nothing but
the position in the log: a replay compares them with what `apply` returned for the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from eventlm.config import CoreConfig
from eventlm.core import forwarding, recovery, scheduler, sequence_manager, worker_facts
from eventlm.core.predictor import Predictor
from eventlm.core.state import snapshot
from eventlm.core.state.core_state import CoreState, replica_of
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.core.state.sequence import IllegalTransitionError
from eventlm.core.step_completion import complete_step
from eventlm.errors import InvariantError, UsageError
from eventlm.events import (
    Arrived,
    BackendDown,
    BackendState,
    BackendUp,
    CacheFlushed,
    Cancelled,
    Decision,
    Desynced,
    Fact,
    ForwardEnded,
    ForwardFailed,
    FrontEndLost,
    GrammarReady,
    Marker,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Recovered,
    Resumed,
    StepCompleted,
    Streamed,
    TextEnded,
    TimerDue,
    WorkerLost,
    WorkerUp,
)
from eventlm.events.base import TIME_LIMIT_NS


class Core:
    """A deterministic state machine. Two of them that are fed the same events are the same."""

    def __init__(
        self, config: CoreConfig, plugins: Plugins, predictor: Predictor, others: Iterable[SetParts] = ()
    ) -> None:
        self.state = CoreState(config, plugins, predictor, others)

    @classmethod
    def restored(
        cls,
        config: CoreConfig,
        plugins: Plugins,
        taken: bytes,
        others: Iterable[SetParts] = (),
        *,
        is_changed: bool = False,
    ) -> Core:
        """The core that a snapshot was taken of; of the other sets the predictors are the snapshot's too. is_changed:
        limits or plug-ins are not those that it had, so that every replica may have something to run.

        Raises InvariantError if it was taken of another kind of core.
        """
        core = cls.__new__(cls)
        core.state = snapshot.restore(config, plugins, taken, others)
        if is_changed:
            for replicaset in core.state.replicasets:
                replicaset.note_all()
        return core

    @property
    def next_seq(self) -> int:
        """The position that the next event must carry."""
        return self.state.next_seq

    @property
    def next_timer_ns(self) -> int | None:
        """When the earliest timer is due; a `timer` fact is owed by then."""
        heads = [heap[0][0] for heap in (self.state.timers, self.state.retries) if heap]
        return min(heads, default=None)

    def apply(self, event: Fact | Marker) -> list[Decision]:
        """Take in a stamped fact or marker; returns the decisions it led to, stamped after it.

        Raises InvariantError for an event that is out of order or contradicts the state.
        """
        state = self.state
        self._check_place(event)
        state.next_seq += 1
        state.now_ns = event.ts
        if isinstance(event, Marker):
            return []
        state.cause = event.s
        state.decisions = []
        state.drain_open = not event.p
        if len(state.replicasets) > 1:
            state.due |= dict.fromkeys(_sets_of(state, event))
        try:
            _HANDLERS[type(event)](state, event)
            if event.p:
                scheduler.plan(state)
        except IllegalTransitionError as error:
            raise InvariantError(f"event {event.s} ({type(event).__name__}): {error}") from error
        if event.p and state.group:
            raise InvariantError(f"event {event.s} ends a drain in the middle of a group of arrivals")
        return state.decisions

    def _check_place(self, event: Fact | Marker) -> None:
        """Facts of one drain share a time, a later drain has a larger one, and markers stand between drains."""
        state = self.state
        if event.s != state.next_seq or not 0 <= event.c <= event.s:
            raise InvariantError(f"event {event.s}, caused by {event.c}, came where event {state.next_seq} was due")
        if isinstance(event, Marker):
            fits = not state.drain_open and event.ts == state.now_ns
        else:
            fits = event.ts == state.now_ns if state.drain_open else event.ts > state.now_ns
            fits = fits and event.p in (0, 1) and event.ts < TIME_LIMIT_NS
        if not fits:
            where = "inside the drain" if state.drain_open else "after the drain"
            raise InvariantError(f"event {event.s} at {event.ts} ns does not fit {where} at {state.now_ns} ns")

    def snapshot(self) -> bytes:
        """The whole state as one JSON object, for `restored`. Between drains only."""
        return snapshot.take(self.state)

    def digests(self) -> dict[str, str]:
        """16 hex digits for each component of the state."""
        return self.state.digests()


def _sets_of(state: CoreState, fact: Fact) -> Iterable[int]:
    """The numbers of the replicasets that a fact is about."""
    if isinstance(fact, WorkerUp | WorkerLost | Desynced | StepCompleted | BackendUp | BackendDown | BackendState):
        return [replica_of(state, fact.replica).replicaset]
    if isinstance(fact, Streamed):
        return {state.requests[row[0]].arrival.replicaset: None for row in fact.rows if row[0] in state.requests}
    if isinstance(fact, Arrived | PredictorSwapped | PolicySwapped | CacheFlushed) and fact.replicaset >= 0:
        return [fact.replicaset]
    if isinstance(fact, Cancelled | TextEnded | GrammarReady | ForwardEnded | ForwardFailed):
        request = state.requests.get(fact.request)
        return [] if request is None else [request.arrival.replicaset]
    return range(len(state.replicasets))


def _swap_predictor(state: CoreState, fact: PredictorSwapped) -> None:
    """New times for all that wait; static keys stay as they were read."""
    try:
        predictor = Predictor.from_coefficients(fact.coefficients)
    except UsageError as error:
        raise InvariantError(f"event {fact.s}: {error}") from error
    meant = state.sets_meant(fact.replicaset)
    for replicaset in meant:
        replicaset.predictor = predictor
        replicaset.note_all()
    for request in state.requests.values():
        replicaset = state.replicasets[request.arrival.replicaset]
        if replicaset not in meant:
            continue
        for s in request.sequences:
            s.view.prefill_ns = replicaset.prefill_ns(s.prompt_tokens)
            s.view.remaining_ns = replicaset.prefill_ns(s.view.prompt_tokens, s.view.done_tokens)


def _timers_due(state: CoreState, fact: TimerDue) -> None:
    sequence_manager.timers_due(state, fact)
    forwarding.retries_due(state, fact.due_ns)


def _pause(state: CoreState, fact: Paused) -> None:
    state.paused = True


def _resume(state: CoreState, fact: Resumed) -> None:
    state.paused = False
    for replicaset in state.replicasets:
        replicaset.note_all()


_HANDLERS: dict[type[Fact], Callable[[CoreState, Any], None]] = {
    Arrived: sequence_manager.arrive,
    Cancelled: sequence_manager.cancel,
    StepCompleted: complete_step,
    TextEnded: sequence_manager.text_end,
    WorkerUp: worker_facts.worker_up,
    WorkerLost: worker_facts.worker_lost,
    Desynced: worker_facts.worker_lost,
    Recovered: recovery.recover,
    TimerDue: _timers_due,
    PredictorSwapped: _swap_predictor,
    PolicySwapped: worker_facts.swap_policy,
    CacheFlushed: worker_facts.flush_caches,
    FrontEndLost: sequence_manager.lose_front_end,
    GrammarReady: sequence_manager.grammar_ready,
    Paused: _pause,
    Resumed: _resume,
    BackendUp: forwarding.backend_up,
    BackendDown: forwarding.backend_down,
    BackendState: forwarding.backend_state,
    Streamed: forwarding.stream,
    ForwardEnded: forwarding.forward_ended,
    ForwardFailed: forwarding.forward_failed,
}
