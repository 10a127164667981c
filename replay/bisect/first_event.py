"""The first event of a recorded run at which a condition holds.

By default a condition is about the event itself: `event` is its tag, `time` its time since the start of the run, and
its fields have their own names (`event == "preempt" and request == 17`). A list stands for its length. The scheduling
parameters of an arrival count as its own fields. Another environment may know the state of the engine too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.events import DECISIONS, FACTS, MARKERS, Arrived, Event
from eventlm.replay.expressions.errors import ExpressionError, not_known
from eventlm.replay.expressions.evaluation import Environment, Value, check_names, check_texts, holds
from eventlm.replay.expressions.syntax import Attribute, CallExpression, Expression, Name
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import OnProgress

#: Makes the environment of each event, in order.
EnvironmentOf = Callable[[Event], Environment]

_TAG, _TIME = "event", "time"
TAGS = tuple(str(kind.__struct_config__.tag) for kind in (*FACTS, *DECISIONS, *MARKERS))
NAMES = tuple(
    dict.fromkeys(
        [
            _TAG,
            _TIME,
            *(name for kind in (*FACTS, *DECISIONS, *MARKERS) for name in kind.__struct_fields__),
            *SchedulingParams.__struct_fields__,
        ]
    )
)


class FoundEvent(Struct, frozen=True, kw_only=True):
    """The first event at which a condition holds; None if it never does. num_events: that were looked at."""

    event: Event | None
    num_events: int
    warnings: list[str]


class EventEnvironment:
    """What one event says by itself. A field that it has not is unknown."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def name(self, node: Name) -> Value:
        """The tag, the time or a field."""
        event = self._event
        if node.name == _TAG:
            return str(event.__struct_config__.tag)
        found = getattr(event, "ts" if node.name == _TIME else node.name, None)
        if found is None and isinstance(event, Arrived):
            found = getattr(event.scheduling, node.name, None)
        if isinstance(found, list):
            return len(found)
        return found if isinstance(found, int | str) else None

    def call(self, node: CallExpression) -> Value:
        """There are none."""
        raise not_known("function", node.name, node.column, [])

    def attribute(self, of: object, node: Attribute) -> Value:
        """There are none."""
        raise not_known("attribute", node.name, node.column, [])


def first_event(
    path: Path | str,
    condition: Expression,
    *,
    environment_of: EnvironmentOf | None = None,
    strict: bool = False,
    on_progress: OnProgress | None = None,
) -> FoundEvent:
    """Read a run until the condition holds. Raises ExpressionError, and what LogReader raises."""
    if environment_of is None:
        check_names(condition, names=NAMES, calls=())
        try:
            check_texts(condition.root, {_TAG: TAGS})
        except ExpressionError as error:
            raise error.located(condition.source) from None
        environment_of = EventEnvironment
    with LogReader(path, strict=strict) as log:
        for num_before, line in enumerate(log.lines(on_progress)):
            event = line.event()
            if holds(condition, environment_of(event)):
                # What lies behind it was not read, so there is nothing to warn of.
                return FoundEvent(event=event, num_events=num_before + 1, warnings=[])
        return FoundEvent(event=None, num_events=log.num_lines, warnings=log.warnings())
