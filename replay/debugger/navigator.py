"""A run, a position in it, and what commands are made of: moving, searching and looking.

A position is an event; the state is the one after it. At a decision it is the state after its fact: a
core takes in a fact and concludes all that follows from it at once.
"""

from __future__ import annotations

from itertools import count

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.core.core import Core
from eventlm.errors import UsageError
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.debugger.condition import Condition
from eventlm.replay.debugger.cursor import CoreCursor, NoStateError
from eventlm.replay.debugger.environment import gauges_of
from eventlm.replay.debugger.event_line import event_line
from eventlm.replay.debugger.gaps import EventNumbers
from eventlm.replay.debugger.gauge_columns import GaugeColumns
from eventlm.replay.debugger.interrupt import Interrupt
from eventlm.replay.debugger.lines import lines_between
from eventlm.replay.debugger.results import ReplicaGauges, Stop, seconds
from eventlm.replay.debugger.search import Mode, Searcher
from eventlm.replay.index.index import Index
from eventlm.replay.index.live import LiveIndex
from eventlm.types import OnProgress

#: Decisions of one fact that are looked through at first to find it.
_LOOK_BACK = 64


class Navigator:
    """position: the event. breakpoints: by number. on_progress: gets events done and in all during long work.

    live: reads on where the run is still being written. trusts_plugins: local plug-ins may be loaded.
    """

    def __init__(
        self,
        index: Index,
        *,
        live: LiveIndex | None = None,
        trusts_plugins: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.trusts_plugins = trusts_plugins
        self.interrupt = Interrupt(on_progress)
        self.breakpoints: dict[int, Condition] = {}
        self.numbers = count(1)
        self._live = live
        self._look_at(index)
        self.position = self.events.first_s

    def _look_at(self, index: Index) -> None:
        if index.facts.next_s <= index.facts.first_s:
            raise UsageError(f"{index.path} has no events")
        self.index = index
        self.events = EventNumbers(index)
        self.gauges = GaugeColumns(index)
        self._cursor = CoreCursor(index, self.interrupt) if index.rebuilt is not None else None
        self._searcher = Searcher(index, self.gauges, self._cursor, self.interrupt)
        self._reader = LogReader(index.path)

    def close(self) -> None:
        """Close the log."""
        self._reader.close()
        if self._cursor is not None:
            self._cursor.close()

    def read_on(self) -> bool:
        """Take in what was written since; whether there was anything."""
        if self._live is None or not self._live.read_on():
            return False
        self.close()
        self._look_at(self._live.index)
        return True

    @property
    def cursor(self) -> CoreCursor:
        """Raises UsageError where the run was not verified."""
        if self._cursor is None:
            raise UsageError(self.index.facts.missing)
        return self._cursor

    @property
    def core(self) -> Core:
        """The core at the position; it is the session's, no event may be applied to it. Raises UsageError."""
        return self.cursor.core_at(self.position)

    @property
    def where(self) -> str:
        """The position in words, for titles."""
        return self.where_at(self.position)

    def where_at(self, s: int) -> str:
        """A position in words, and which event the state belongs to."""
        line = self.line(s)
        words = f"at event {s:,} ({seconds(line.event().ts)})"
        return words if line.tag not in DECISION_TAGS else f"{words}, after the fact {self.fact_of(s):,}"

    def line(self, s: int) -> LogLine:
        """The line of an event of the run. Raises UsageError if the trace has it no more."""
        for line in self._reader.lines_from(s):
            return line
        raise UsageError(f"event {s:,} is not in {self.index.path} any more: the trace was cut since it was opened")

    def fact_of(self, s: int) -> int:
        """The fact that a decision follows from; of other events themselves."""
        num_lines = _LOOK_BACK
        while True:
            start = max(s - num_lines, self.events.first_s)
            found = -1
            for line in lines_between(self._reader, start, s):
                if line.tag not in DECISION_TAGS:
                    found = line.s
            if found >= 0 or start == self.events.first_s:
                return found
            num_lines *= 8

    def check_place(self, s: int) -> int:
        """The event itself. Raises UsageError for one that was not recorded."""
        gap = self.events.gap_with(s)
        if gap is not None:
            raise UsageError(f"event {s:,} was not recorded: events {gap[0]:,} to {gap[1]:,} are missing")
        return s

    def move_to(self, s: int, *why: str) -> Stop:
        """Go to an event."""
        stop = self.stop_at(self.check_place(s), *why)
        self.position = s
        return stop

    def stop_at(self, s: int, *why: str) -> Stop:
        """What a stop at an event shows."""
        self.interrupt.expect(0)
        line = self.line(s)
        event = line.event()
        found = Stop(
            s=s, ts=event.ts, event=line.tag, line=event_line(event), why=[*why], replicas=self._recorded_gauges(s)
        )
        if self._cursor is None:
            return found
        try:
            state = self._cursor.core_at(s).state
        except NoStateError as error:
            return Stop(s=s, ts=event.ts, event=line.tag, line=event_line(event), why=[*why], note=str(error))
        return Stop(
            s=s,
            ts=event.ts,
            event=line.tag,
            line=event_line(event),
            why=[*why],
            state_s=self.fact_of(s) if line.tag in DECISION_TAGS else s,
            is_inside_drain=state.drain_open,
            policy=state.policy_name,
            replicas=[ReplicaGauges(replica=each.index, **gauges_of(state, each.index)) for each in state.replicas],
        )

    def _recorded_gauges(self, s: int) -> list[ReplicaGauges]:
        """As far as the log alone tells."""
        found = self.index.gauges_at(self.gauges.drain_at(s))
        names = ("replica", "waiting", "running", "held")
        return [ReplicaGauges(**{name: row[name] for name in names}) for row in found.values()]

    def search(self, condition: Condition, *, mode: Mode, forward: bool, limit: int | None = None) -> int | None:
        """The next hit after the position, or the last before it; not beyond `limit`."""
        self.interrupt.begin()
        if not forward:
            return self._searcher.previous(condition, self.position, mode, limit)
        found = self._searcher.next(condition, self.position, limit or self.events.last_s, mode)
        if found is not None or limit is not None:
            return found
        # The latest drain may not have been over.
        searched = max([self.position, *self.gauges.drains[-1:].tolist()])
        return self._searcher.next(condition, searched, self.events.last_s, mode) if self.read_on() else None

    def first(self, condition: Condition) -> int | None:
        """The first event of the run at which it holds."""
        self.interrupt.begin()
        return self._searcher.next(condition, self.events.first_s - 1, self.events.last_s, "level")

    def check(self, condition: Condition) -> Condition:
        """The condition itself, if the run can answer it."""
        self._searcher.check(condition)
        return condition

    def values(self, condition: Condition, s: int) -> str:
        """The value of an expression at an event, in words; of several replicas, each."""
        found = [_in_words(value) for value in self._searcher.values_at(condition, s)]
        return (
            found[0] if len(set(found)) == 1 else ", ".join(f"{value} (replica {n})" for n, value in enumerate(found))
        )


def _in_words(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else str(value)
