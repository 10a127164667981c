"""Finds the events at which a condition holds, becomes true, or at which a value changes; forwards and backwards.

A hit is the position of an event: for gauges the last fact of a drain, for the core's state a fact or marker, for a
condition on events any event. A condition on events holds at each event for itself. The others last, so a breakpoint
on one stops only where it becomes true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.core.state.core_state import CoreState
from eventlm.errors import UsageError
from eventlm.replay.debugger.condition import GAUGES, SHARED, Condition
from eventlm.replay.debugger.cursor import CoreCursor, NoStateError
from eventlm.replay.debugger.environment import PositionEnvironment
from eventlm.replay.debugger.event_fields import FieldReader
from eventlm.replay.debugger.gauge_columns import NEEDS_STATES, GaugeColumns
from eventlm.replay.debugger.interrupt import Interrupt
from eventlm.replay.debugger.lines import lines_between
from eventlm.replay.debugger.places import check_sequence
from eventlm.replay.debugger.vectors import truth, vector
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import Value, truth_of, value_of
from eventlm.replay.expressions.syntax import CallExpression, Name, Node, Number, walk
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import MarkKind

#: level: wherever it holds. edge: where it becomes true. change: where the value is another than before.
Mode: TypeAlias = Literal["level", "edge", "change"]
#: Events that are read at once going backwards.
_BLOCK = 16384
#: A value for each replica, or one.
_Values: TypeAlias = tuple[Value, ...]


class _Sample(NamedTuple):
    s: int
    values: _Values


class _Candidate(NamedTuple):
    """An event that may fulfil a condition: its line, what is left to evaluate, and its fields."""

    line: LogLine
    node: Node
    event: dict[str, Value]


def _candidates(lines: Iterable[LogLine], condition: Condition) -> Iterator[_Candidate]:
    nodes = condition.by_tag()
    read = FieldReader(condition.event_names).read
    for line in lines:
        node = nodes.get(line.tag)
        if node is not None:
            yield _Candidate(line, node, read(line))


def event_hits(lines: Iterable[LogLine], condition: Condition) -> Iterator[LogLine]:
    """Those lines at whose events a condition on events alone holds. Raises ExpressionError."""
    for line, node, event in _candidates(lines, condition):
        if condition.holds(PositionEnvironment(None, {}, event, -1), node):
            yield line


class Searcher:
    """Searches one index. cursor: None where the run was not verified."""

    def __init__(self, index: Index, gauges: GaugeColumns, cursor: CoreCursor | None, interrupt: Interrupt) -> None:
        self._index = index
        self._gauges = gauges
        self._cursor = cursor
        self._interrupt = interrupt

    def check(self, condition: Condition) -> None:
        """Raise ExpressionError or UsageError for what this run cannot answer."""
        if self._cursor is not None:
            self._check_sequences(condition)
            return
        for node in walk(condition.expression.root):
            if isinstance(node, Name) and node.name in NEEDS_STATES:
                problem = f"{node.name} is not known: {self._index.facts.missing}"
                raise ExpressionError(node.column, problem, condition.text)
        if condition.reads_core:
            raise UsageError(f"{condition.text!r} needs states: {self._index.facts.missing}")

    def _check_sequences(self, condition: Condition) -> None:
        """Raise ExpressionError for one that is not in the run. What a gap hides, or is still to come, may be."""
        index = self._index
        if (index.marks["kind"] == MarkKind.GAP).any():
            return
        for node in walk(condition.expression.root):
            if isinstance(node, CallExpression) and node.name in ("req", "seq"):
                request, sample = [*(each.value for each in node.arguments if isinstance(each, Number)), 0][:2]
                if request >= index.facts.next_s and not index.facts.is_ended:
                    continue
                try:
                    check_sequence(index, request, sample)
                except UsageError as error:
                    raise ExpressionError(node.column, str(error), condition.text) from None

    def next(self, condition: Condition, after_s: int, last_s: int, mode: Mode) -> int | None:
        """The first hit after an event, up to `last_s`."""
        self.check(condition)
        if condition.source == "columns":
            hits = self._column_hits(condition, mode)
            at = int(np.searchsorted(hits, after_s, side="right"))
            return int(hits[at]) if at < len(hits) and hits[at] <= last_s else None
        self._interrupt.expect(last_s - after_s)
        return next(self._hits(condition, after_s, last_s, mode), None)

    def previous(self, condition: Condition, before_s: int, mode: Mode, first_s: int | None = None) -> int | None:
        """The last hit before an event, not before `first_s`."""
        self.check(condition)
        if condition.source == "columns":
            hits = self._column_hits(condition, mode)
            at = int(np.searchsorted(hits, before_s, side="left")) - 1
            return int(hits[at]) if at >= 0 and hits[at] >= (first_s or 0) else None
        self._interrupt.expect(before_s - self._index.facts.first_s)
        end = before_s
        for start in self._starts_before(condition, before_s):
            last = deque(self._hits(condition, start - 1, end - 1, mode), maxlen=1)
            if last:
                return last[0] if last[0] >= (first_s or 0) else None
            if first_s is not None and start <= first_s:
                return None
            end = start
        return None

    def values_at(self, condition: Condition, s: int) -> _Values:
        """The value of an expression at an event: for each replica, or one."""
        self.check(condition)
        event = None
        if condition.reads_events:
            with LogReader(self._index.path) as reader:
                line = next(iter(reader.lines_from(s)))
                event = FieldReader(condition.event_names).read(line)
        state = self._cursor.core_at(s).state if self._cursor is not None and condition.reads_core else None
        return self._values(condition, condition.expression.root, s, state, event, is_truth=False)

    def _starts_before(self, condition: Condition, s: int) -> Iterator[int]:
        """Where to begin to read on the way back, one after the other."""
        first_s = self._index.facts.first_s
        if condition.reads_core:
            snapshots = self._index.snapshots
            at = len(snapshots) - 1
            while at >= 0:
                next_s = snapshots[at].next_s
                if first_s < next_s < s:
                    yield next_s
                at -= 1
            yield first_s
            return
        start = s
        while start > first_s:
            start = max(start - _BLOCK, first_s)
            yield start

    def _column_hits(self, condition: Condition, mode: Mode) -> NDArray[np.int64]:
        """All hits of a condition on gauges."""
        gauges, root = self._gauges, condition.expression.root
        num_drains = len(gauges.drains)
        found = np.zeros(num_drains, np.bool_)
        try:
            for replica in self._replicas(condition):
                columns = gauges.columns(condition.names, max(replica, 0))
                if mode == "change":
                    values = vector(root, columns, num_drains)
                    now = np.broadcast_to(np.asarray(values.values), num_drains)
                    known = np.broadcast_to(True if values.is_known is None else values.is_known, num_drains)
                    differs = (now[1:] != now[:-1]) & (known[1:] | known[:-1]) | (known[1:] != known[:-1])
                    found[1:] |= differs
                    found[:1] |= known[:1]
                else:
                    found |= truth(root, columns, num_drains)
        except ExpressionError as error:
            raise error.located(condition.text) from None
        if mode == "edge":
            found[1:] &= ~found[:-1]
        return gauges.drains[np.flatnonzero(found)]

    def _hits(self, condition: Condition, after_s: int, last_s: int, mode: Mode) -> Iterator[int]:
        """The hits after an event, up to `last_s`, in order."""
        if not condition.reads_core:
            yield from self._line_hits(condition, after_s, last_s)
            return
        # Events are hits for themselves.
        mode = "level" if condition.reads_events and mode == "edge" else mode
        before: _Values = ()
        if mode != "level" and after_s >= self._index.facts.first_s:
            try:
                before = self.values_at(condition, after_s)
            except NoStateError:
                before = ()
        for s, values in self._samples(condition, after_s, last_s, is_truth=mode != "change"):
            if mode == "change":
                if values != before and (before or any(value is not None for value in values)):
                    yield s
            elif any(values) and (mode == "level" or not any(before)):
                yield s
            before = values

    def _line_hits(self, condition: Condition, after_s: int, last_s: int) -> Iterator[int]:
        with LogReader(self._index.path) as reader:
            lines = self._checked(lines_between(reader, after_s + 1, last_s))
            if condition.is_of_events:
                yield from (line.s for line in event_hits(lines, condition))
                return
            for line, node, event in _candidates(lines, condition):
                if any(self._values(condition, node, line.s, None, event, is_truth=True)):
                    yield line.s

    def _checked(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        check = self._interrupt.check
        for line in lines:
            check()
            yield line

    def _samples(self, condition: Condition, after_s: int, last_s: int, *, is_truth: bool) -> Iterator[_Sample]:
        """Values of a condition that needs the core, at each fact and marker, or where it names events at each event
        that may fulfil it.
        """
        assert self._cursor is not None
        cursor = self._cursor
        root = condition.expression.root
        nodes: dict[str, Node] | None = None
        read: Callable[..., dict[str, Value]] | None = None
        if condition.reads_events:
            nodes, read = condition.by_tag(), FieldReader(condition.event_names).read
        for line in cursor.follow(after_s, last_s, with_decisions=nodes is not None):
            if nodes is None:
                values = self._values(condition, root, line.s, cursor.core.state, None, is_truth=is_truth)
                yield _Sample(line.s, values)
            elif read is not None and (node := nodes.get(line.tag)) is not None:
                values = self._values(condition, node, line.s, cursor.core.state, read(line), is_truth=is_truth)
                yield _Sample(line.s, values)

    def _replicas(self, condition: Condition) -> range:
        """Those that it is asked of; -1: of none in particular."""
        needs_each = condition.reads_gauges and set(condition.names) & ((GAUGES - {"live"}) | {"replica"})
        return range(self._gauges.num_replicas) if needs_each else range(-1, 0)

    def _values(
        self,
        condition: Condition,
        node: Node,
        s: int,
        state: CoreState | None,
        event: dict[str, Value] | None,
        *,
        is_truth: bool,
    ) -> _Values:
        look = truth_of if is_truth else value_of
        try:
            if not condition.reads_gauges and condition.source != "columns":
                return (look(node, PositionEnvironment(state, {}, event, -1)),)
            replicas = self._replicas(condition)
            own = None if event is None else event.get("replica")
            if isinstance(own, int) and replicas[0] >= 0:
                replicas = range(own, own + 1)
            names = [name for name in condition.names if name in GAUGES or (name in SHARED and event is None)]
            found = []
            for replica in replicas:
                gauges = self._gauges.values(names, max(replica, 0), s)
                found.append(look(node, PositionEnvironment(state, gauges, event, replica)))
            return tuple(found)
        except ExpressionError as error:
            raise error.located(condition.text) from None
