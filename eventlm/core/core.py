"""The door: `Core.apply(event)` is the only way in which the state changes.

Facts are applied in order; plans are made at the fact that carries the mark. Decisions and markers change nothing but
the position in the log: a replay compares them with what `apply` returned for the facts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.config import CoreConfig
from eventlm.core import replicaset, sequence_manager
from eventlm.core.predictor import Predictor
from eventlm.core.state import CoreState, Plugins
from eventlm.core.step_completion import complete_step
from eventlm.errors import InvariantError
from eventlm.events import (
    Arrived,
    Cancelled,
    Decision,
    Desynced,
    Fact,
    FrontEndLost,
    GrammarReady,
    Marker,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Resumed,
    StepCompleted,
    TextEnded,
    TimerDue,
    WorkerLost,
    WorkerUp,
)


class Core:
    """A deterministic state machine. Two of them that are fed the same events are the same."""

    def __init__(self, config: CoreConfig, plugins: Plugins, predictor: Predictor) -> None:
        self.state = CoreState(config, plugins, predictor)

    @property
    def next_seq(self) -> int:
        """The position that the next event must carry."""
        return self.state.next_seq

    @property
    def next_timer_ns(self) -> int | None:
        """When the earliest timer is due; a `timer` fact is owed by then."""
        return self.state.timers[0][0] if self.state.timers else None

    def apply(self, event: Fact | Marker) -> list[Decision]:
        """Take in a stamped fact or marker; returns the decisions it led to, stamped behind it.

        Raises InvariantError for an event that is out of order or contradicts the state.
        """
        state = self.state
        if event.s != state.next_seq or event.ts < state.now_ns:
            raise InvariantError(
                f"event {event.s} at {event.ts} is out of order: {state.next_seq} at {state.now_ns} ns or later is due"
            )
        state.next_seq += 1
        state.now_ns = event.ts
        if isinstance(event, Marker):
            return []
        state.cause = event.s
        state.decisions = []
        _HANDLERS[type(event)](state, event)
        if event.p:
            replicaset.plan(state)
        return state.decisions

    def digests(self) -> dict[str, str]:
        """16 hex digits for each component of the state."""
        return self.state.digests()


def _swap_predictor(state: CoreState, fact: PredictorSwapped) -> None:
    """New times for all that wait; static keys stay as they were read."""
    state.predictor = Predictor.from_coefficients(fact.coefficients)
    chunk = state.config.max_num_batched_tokens
    for request in state.requests.values():
        for s in request.sequences:
            s.view.prefill_ns = state.predictor.prefill_ns(s.prompt_tokens, 0, chunk)
            s.view.remaining_ns = state.predictor.prefill_ns(s.view.prompt_tokens, s.view.done_tokens, chunk)


def _swap_policy(state: CoreState, fact: PolicySwapped) -> None:
    """Another policy orders all that wait; residents keep the urgency of their admission."""
    policy = state.plugins.policies.get(fact.name)
    if policy is None:
        raise InvariantError(f"policy {fact.name!r} was not installed at start")
    state.policy_name, state.policy = fact.name, policy
    for queue in [state.shared_queue, *(replica.queue for replica in state.replicas)]:
        queue.rebuild(state.keys_for(queue.views), static=policy.static)


def _pause(state: CoreState, fact: Paused) -> None:
    state.paused = True


def _resume(state: CoreState, fact: Resumed) -> None:
    state.paused = False


def _timers(state: CoreState, fact: TimerDue) -> None:
    for request in state.pop_timers(fact.due_ns):
        sequence_manager.drop_late(state, request)


_HANDLERS: dict[type[Fact], Callable[[CoreState, Any], None]] = {
    Arrived: sequence_manager.arrive,
    Cancelled: lambda state, fact: sequence_manager.finish_request(state, fact.request, "cancelled"),
    StepCompleted: complete_step,
    TextEnded: sequence_manager.text_end,
    WorkerUp: replicaset.worker_up,
    WorkerLost: lambda state, fact: replicaset.worker_lost(state, fact.replica, fact.epoch),
    Desynced: lambda state, fact: replicaset.worker_lost(state, fact.replica, fact.epoch),
    TimerDue: _timers,
    PredictorSwapped: _swap_predictor,
    PolicySwapped: _swap_policy,
    FrontEndLost: lambda state, fact: sequence_manager.lose_front_end(state, fact.front_end),
    GrammarReady: lambda state, fact: sequence_manager.grammar_ready(state, fact.request, fact.error),
    Paused: _pause,
    Resumed: _resume,
}
