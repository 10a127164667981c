"""The lines of a trace that are about a request, of a kind, of a time or of a cause, as they stand in the file."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from msgspec import Struct

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.errors import UsageError
from eventlm.events import Arrived, Emitted, Event, Launched, Preempted, StepCompleted, StepOps
from eventlm.events.codec import close_line
from eventlm.types import OnProgress

#: Whose rows are those of the launch that led to them.
_WITHOUT_ROWS = (StepCompleted, Emitted, StepOps)
_TAGS_WITHOUT_ROWS = frozenset(str(kind.__struct_config__.tag) for kind in _WITHOUT_ROWS)


class Query(Struct, frozen=True, kw_only=True):
    """What a line must be, all of it. Empty or None: no matter.

    request and index: it names that request or sequence, as its own, as one of a step's rows, or as who needed the
    room. tags: one of these kinds. from_ns, to_ns: its `ts`, both included. cause: its `c`.
    """

    request: int | None = None
    index: int | None = None
    tags: frozenset[str] = frozenset()
    from_ns: int = 0
    to_ns: int | None = None
    cause: int | None = None


def grep(reader: LogReader, query: Query, *, on_progress: OnProgress | None = None) -> Iterator[bytes]:
    """The matching lines, newlines included. Raises as LogReader does, and UsageError where there is no such request.

    What lies before the request, the cause or the time is skipped by bisection and not checked.
    """
    first_s = reader.header.s
    if query.request is not None and query.request >= first_s:
        _check_request(reader, query.request)
    start = max(query.request or 0, query.cause or 0, _first_at(reader, query.from_ns) if query.from_ns > 0 else 0)
    with LogReader(reader.path) as side_reader:
        matcher = _Matcher(query, side_reader, max(start, first_s))
        for line in reader.lines(on_progress, from_s=start):
            found = matcher.match(line)
            if found is None:
                return
            if found:
                yield close_line(line.body, reader.last_h)


def _check_request(reader: LogReader, request: int) -> None:
    line = _line_at(reader, request)
    if line is None or line.s != request or line.tag != "arrive":
        is_what = "is not in the trace" if line is None or line.s != request else f"is `{line.tag}`"
        raise UsageError(
            f"{reader.path} has no request {request}: event {request} {is_what}; a request is named by the `s` of its "
            "arrival, which `eventlm trace grep --kind arrive` lists"
        )


def _first_at(reader: LogReader, ts: int) -> int:
    """The first event that is not before `ts`; after the last if there is none. Times never fall along the log."""

    def time_of(s: int) -> int:
        line = _line_at(reader, s)
        return line.event().ts if line is not None else ts

    # No line is as short as a byte.
    indices = range(reader.header.s, reader.header.s + reader.size_bytes)
    return indices.start + bisect_left(indices, ts, key=time_of)


def _line_at(reader: LogReader, s: int) -> LogLine | None:
    """The line of event `s`, or the next where a gap has swallowed it."""
    return next(reader.lines_from(s), None)


class _Matcher:
    """Matches lines, which must come in order; None once no later one can match."""

    def __init__(self, query: Query, side_reader: LogReader, first_s: int) -> None:
        self._query = query
        self._side_reader = side_reader
        self._first_s = first_s
        self._digits = str(query.request).encode()
        #: Positions of launches and completions that were about the request.
        self._steps: set[int] = set()

    def match(self, line: LogLine) -> bool | None:
        query = self._query
        if query.request is not None and not self._may_name(line):
            return False
        if query.tags and line.tag not in query.tags and not self._is_needed_later(line):
            return False
        event = line.event()
        if query.to_ns is not None and event.ts > query.to_ns:
            return None
        # Asked of every step, for the sake of those that it leads to.
        names = query.request is None or self._names(event)
        return (
            names
            and (not query.tags or line.tag in query.tags)
            and event.ts >= query.from_ns
            and (query.cause is None or event.c == query.cause)
        )

    def _may_name(self, line: LogLine) -> bool:
        """Without the cost of decoding it."""
        return line.tag in _TAGS_WITHOUT_ROWS or line.s == self._query.request or self._digits in line.body

    def _is_needed_later(self, line: LogLine) -> bool:
        return self._query.request is not None and line.tag in ("launch", "done")

    def _names(self, event: Event) -> bool:
        request, index = self._query.request, self._query.index
        if isinstance(event, _WITHOUT_ROWS):
            return self._step_names(event)
        if isinstance(event, Launched):
            rows = [*event.decodes, *event.chunks, *event.forget]
            found = any(row[0] == request and index in (None, row[1]) for row in rows)
            if found:
                self._steps.add(event.s)
            return found
        if isinstance(event, Arrived):
            return event.s == request
        if isinstance(event, Preempted) and event.by is not None and event.by[0] == request:
            return index in (None, event.by[1]) or self._is(event)
        return self._is(event)

    def _is(self, event: Event) -> bool:
        """Whether it is about the request, or about the sequence if it names one."""
        index = getattr(event, "index", -1)
        return getattr(event, "request", None) == self._query.request and (
            self._query.index in (None, index) or index == -1
        )

    def _step_names(self, event: Event) -> bool:
        found = event.c in self._steps
        if event.c < self._first_s:
            # What led to it was skipped.
            line = _line_at(self._side_reader, event.c) if event.c > self._side_reader.header.s else None
            cause = line.event() if line is not None and line.s == event.c else None
            found = isinstance(cause, (Launched, *_WITHOUT_ROWS)) and self._names(cause)
        if found:
            self._steps.add(event.s)
        return found
