"""The first event of a recorded run at which a condition of the debugger holds.

One on events alone is answered by the lines of the log, up to the first that fulfils it. One on gauges or the core's
state needs the run's index.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.events import Event
from eventlm.replay.debugger.condition import Condition
from eventlm.replay.debugger.navigator import Navigator
from eventlm.replay.debugger.search import event_hits
from eventlm.types import OnProgress


class FoundEvent(Struct, frozen=True, kw_only=True):
    """The first event at which a condition holds; None if it never does. num_events: those up to it, or all.

    warnings: on what was read of the run.
    """

    event: Event | None
    num_events: int
    warnings: list[str]


def first_event(
    path: Path | str, condition: Condition, *, strict: bool = False, on_progress: OnProgress | None = None
) -> FoundEvent:
    """Read a run until a condition on events alone holds. Raises ExpressionError, and what LogReader raises."""
    with LogReader(path, strict=strict) as log:
        for line in event_hits(log.lines(on_progress), condition):
            # What lies behind it was not read, so there is nothing to warn of.
            return FoundEvent(event=line.event(), num_events=log.num_lines, warnings=[])
        return FoundEvent(event=None, num_events=log.num_lines, warnings=log.warnings())


def first_event_of_index(navigator: Navigator, condition: Condition, *, strict: bool = False) -> FoundEvent:
    """Ask an open run. strict: a torn end raises TornTraceError.

    Raises ExpressionError, and UsageError if the condition needs states that there are none of.
    """
    facts, events = navigator.index.facts, navigator.events
    if strict:
        with LogReader(navigator.index.path, strict=True) as log:
            for _ in log.lines_from(events.last_s):
                pass
    s = navigator.first(condition)
    return FoundEvent(
        event=None if s is None else navigator.line(s).event(),
        num_events=events.num_until(events.last_s if s is None else s),
        warnings=[*facts.warnings, *([facts.missing] if facts.missing else [])],
    )
