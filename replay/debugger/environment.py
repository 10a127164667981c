"""What the names and calls of an expression mean at one position of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence, State
from eventlm.replay.debugger.condition import GAUGES
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import Value
from eventlm.replay.expressions.syntax import Attribute, CallExpression, Name

_OF_STATE: dict[str, Callable[[CoreState], Value]] = {
    "policy": lambda state: state.policy_name,
    "paused": lambda state: state.paused,
    "closing": lambda state: state.num_closing,
    "timers": lambda state: len(state.timers) - state.num_dead_timers,
    "suspects": lambda state: sum(len(each.suspects) for each in state.replicasets),
}
_OF_SEQUENCE: dict[str, Callable[[Sequence], Value]] = {
    "state": lambda each: each.state.name.lower(),
    "live": lambda each: True,
    "tokens": lambda each: each.num_tokens,
    "prompt_tokens": lambda each: each.prompt_tokens,
    "output_tokens": lambda each: each.num_output_tokens,
    "launched_tokens": lambda each: each.launched_tokens,
    "cached_tokens": lambda each: each.cached_tokens,
    "blocks": lambda each: len(each.block_table),
    "skips": lambda each: each.skips,
    "evictions": lambda each: each.evictions,
    "admissions": lambda each: each.residency,
    "in_flight": lambda each: each.in_flight,
    "replica": lambda each: each.replica if each.replica >= 0 else None,
    "home": lambda each: each.home if each.home >= 0 else None,
    "priority": lambda each: each.urgency[0],
    "key": lambda each: each.urgency[1],
}
_OF_REPLICA: dict[str, Callable[[CoreState, Replica], Value]] = {
    "up": lambda state, each: each.up,
    "epoch": lambda state, each: each.epoch,
    "waiting": lambda state, each: len(each.queue) + len(state.set_of(each).shared_queue),
    "running": lambda state, each: len(each.running),
    "partial": lambda state, each: each.num_partial,
    "free": lambda state, each: each.pool.num_available - each.pool.num_idle,
    "held": lambda state, each: each.pool.num_blocks - each.pool.num_available,
    "cached": lambda state, each: each.pool.num_idle,
    "in_flight": lambda state, each: len(each.in_flight),
    "next_step": lambda state, each: each.next_step,
}
_ABSENT = object()


def find_sequence(state: CoreState, request: int, index: int) -> Sequence | None:
    """A sequence that is live, that is: has not ended; else None."""
    found = state.requests.get(request)
    if found is None or not 0 <= index < len(found.sequences):
        return None
    sequence = found.sequences[index]
    return None if sequence.state is State.FINISHED else sequence


class PositionEnvironment:
    """state: None: expressions name nothing of the core. gauges: by name, those of `replica`. event: by name, fields of
    the event; None: replica and time are those of the gauges.
    """

    def __init__(
        self, state: CoreState | None, gauges: dict[str, Value], event: dict[str, Value] | None, replica: int
    ) -> None:
        self._state = state
        self._gauges = gauges
        self._event = event
        self._replica = replica

    def name(self, node: Name) -> object:
        name = node.name
        event = self._event
        if name == "replica":
            found = None if event is None else event.get(name)
            # A gauge's, where there is no event that has one.
            return self._replica if found is None and self._replica >= 0 else found
        if event is not None and name in event:
            return event[name]
        if name == "time" and self._state is not None:
            return self._state.now_ns
        if name in GAUGES or name == "time":
            return self._gauges.get(name)
        if name in _OF_STATE and self._state is not None:
            return _OF_STATE[name](self._state)
        return None

    def call(self, node: CallExpression) -> object:
        # A condition has been checked: they are numbers.
        numbers: list[int] = [each.value for each in node.arguments]  # type: ignore[union-attr,misc]
        if self._state is None:
            return _ABSENT
        if node.name == "replica":
            if numbers[0] >= len(self._state.replicas):
                raise ExpressionError(
                    node.column, f"there is no replica {numbers[0]}, only {len(self._state.replicas)}"
                )
            return self._state.replicas[numbers[0]]
        request, index = numbers[0], numbers[1] if len(numbers) > 1 else 0
        return find_sequence(self._state, request, index) or _ABSENT

    def attribute(self, of: object, node: Attribute) -> object:
        if isinstance(of, Sequence):
            return _OF_SEQUENCE[node.name](of)
        if isinstance(of, Replica):
            assert self._state is not None
            return _OF_REPLICA[node.name](self._state, of)
        return False if node.name == "live" else None


def gauges_of(state: CoreState, replica: int) -> dict[str, Any]:
    """The gauges that a replica has right now, inside a drain too; -1 for what nobody knows of another server."""
    found = {name: read(state, state.replicas[replica]) for name, read in _OF_REPLICA.items() if name in GAUGES}
    if state.replicas[replica].capacity is not None:
        found |= dict.fromkeys(("partial", "free", "cached", "held"), -1)
    return found
