"""Describes the difference of two decisions at the same position of two runs."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.events import (
    Admitted,
    Closing,
    Emitted,
    Event,
    Finished,
    Forwarded,
    Launched,
    PluginFailed,
    Preempted,
    Rejected,
    Relayed,
    RetrySet,
    Routed,
    TimerSet,
    Withdrawn,
)
from eventlm.replay.diff.comparable import ComparableNames, Name

#: Rows of a launch that are described, for each kind of difference.
MAX_ROWS = 3


class Run(NamedTuple):
    """One of the two runs: its log, the names of its requests, and the arrival of the first that both have."""

    reader: LogReader
    names: ComparableNames
    origin_ns: int

    def event(self, s: int) -> Event:
        """The event at a position."""
        return next(self.reader.lines_from(s)).event()


class Story(NamedTuple):
    """A difference in a sentence, further details, and the pairs concerned."""

    what: str
    details: list[str]
    pairs: list[int]


class DecisionRow(NamedTuple):
    """A row of a launch: its sequence and tokens. A decode computes one."""

    name: Name
    sample: int
    is_chunk: bool
    position: int
    num_tokens: int


def describe(event_a: Event | None, event_b: Event | None, a: Run, b: Run) -> Story:
    """At least one of the events is not None."""
    if isinstance(event_a, Launched) and isinstance(event_b, Launched):
        return _describe_launches(event_a, event_b, a, b)
    action_a, action_b = _action(event_a, a.names), _action(event_b, b.names)
    names = [
        run.names.of(event.request)
        for event, run in ((event_a, a), (event_b, b))
        if event is not None and hasattr(event, "request")
    ]
    return Story(f"A {action_a}, B {action_b}", [], _pairs(names))


def seconds(ns: int) -> str:
    """A time with microseconds."""
    return f"{ns / 1e9:,.6f} s"


def _pairs(names: list[Name]) -> list[int]:
    return [name for name in dict.fromkeys(names) if isinstance(name, int) and name > 0]


def _label(name: Name, index: int | None = None) -> str:
    """A request, or one of its sequences; the first has no number of its own."""
    sample = f".{index}" if index else ""
    if isinstance(name, str):
        request, _, whose = name.partition(" ")
        return f"request {request}{sample} {whose}"
    return f"#{name}{sample}" if name > 0 else f"earlier request {-name}{sample}"


def _action(event: Event | None, names: ComparableNames) -> str:
    """A decision as a predicate."""
    if event is None:
        return "has no such decision"
    name = _label(names.of(event.request), getattr(event, "index", None)) if hasattr(event, "request") else ""
    match event:
        case Launched():
            num_rows = len(event.decodes) + len(event.chunks)
            return f"launches {num_rows} rows ({event.num_tokens} tokens) on replica {event.replica}"
        case Emitted():
            dropped = f" without {sum(num for _, num in event.dropped)} dropped ones" if event.dropped else ""
            return f"emits {event.num_tokens} tokens of a step of replica {event.replica}{dropped}"
        case Preempted():
            by = f", for {_label(names.of(event.by[0]), event.by[1])}" if event.by is not None else ""
            return f"preempts {name} ({event.reason}{by})"
        case Rejected():
            return f"rejects {name} ({event.reason})"
        case Admitted():
            return f"admits {name}"
        case Routed():
            return f"routes {_label(names.of(event.request))} to replica {event.replica}"
        case Closing():
            return f"closes {name} at token {event.position} ({event.reason})"
        case Finished():
            return (
                f"finishes {name} with {event.position} tokens ({event.reason}, "
                f"{event.cached_tokens} prompt tokens from the cache)"
            )
        case TimerSet():
            return f"sets a timer for {name}"
        case Forwarded():
            hedge = ", beside another attempt," if event.hedge else ""
            return f"sends {name}{hedge} to backend {event.replica} (attempt {event.attempt})"
        case RetrySet():
            return f"lets {name} wait to be sent again after attempt {event.attempt} at backend {event.replica}"
        case Withdrawn():
            return f"withdraws attempt {event.attempt} of {name} at backend {event.replica}"
        case Relayed():
            return f"relays {event.num_tokens} tokens of backends"
        case PluginFailed():
            return f"notes that a plug-in failed ({event.error})"
    raise TypeError(f"no decision: {event}")


def _rows(event: Launched, names: ComparableNames) -> dict[tuple[Name, int], DecisionRow]:
    decodes = [DecisionRow(names.of(request), index, False, length, 1) for request, index, length, _ in event.decodes]
    chunks = [DecisionRow(names.of(request), index, True, start, num) for request, index, start, num, _ in event.chunks]
    return {(row.name, row.sample): row for row in (*decodes, *chunks)}


def _work(row: DecisionRow) -> str:
    """The tokens that a row computes."""
    if row.is_chunk:
        if row.num_tokens == 1:
            return f"prompt token {row.position:,}"
        return f"prompt tokens {row.position:,} to {row.position + row.num_tokens - 1:,}"
    return f"a token after {row.position:,}"


def _describe_launches(event_a: Launched, event_b: Launched, a: Run, b: Run) -> Story:
    rows_a, rows_b = _rows(event_a, a.names), _rows(event_b, b.names)
    only_a = [row for key, row in rows_a.items() if key not in rows_b]
    only_b = [row for key, row in rows_b.items() if key not in rows_a]
    changed = [(row, rows_b[key]) for key, row in rows_a.items() if key in rows_b and rows_b[key] != row]
    where = f"on replica {event_a.replica}"
    if only_a and only_b:
        what = f"{where} A launches {_list(only_a)} where B launches {_list(only_b)}"
    elif only_a or only_b:
        runs = "A launches {}, B does not" if only_a else "B launches {}, A does not"
        what = f"{where} {runs.format(_list(only_a or only_b))}"
    elif changed:
        before, after = changed[0]
        what = f"{where} A computes {_work(before)} of {_label(before.name, before.sample)}, B {_work(after)}"
    elif list(rows_a) != list(rows_b):
        what = f"{where} A launches the same rows as B in another order"
    else:
        what = f"{where} A and B launch the same rows, but with other blocks, limits or steps in flight"
    details = [_elsewhere(row, "B", b) for row in only_a[:MAX_ROWS] if not _is_earlier(row)]
    details += [_elsewhere(row, "A", a) for row in only_b[:MAX_ROWS] if not _is_earlier(row)]
    details += [
        f"{_label(before.name, before.sample)}: A computes {_work(before)}, B {_work(after)}"
        for before, after in changed[:MAX_ROWS]
    ]
    rows = [*only_a[:MAX_ROWS], *only_b[:MAX_ROWS], *(row for row, _ in changed[:MAX_ROWS])]
    return Story(what, details, _pairs([row.name for row in rows]))


def _list(rows: list[DecisionRow]) -> str:
    labels = [f"{_label(row.name, row.sample)} ({_work(row)})" for row in rows[:MAX_ROWS]]
    rest = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    return ", ".join(labels) + rest


def _is_earlier(row: DecisionRow) -> bool:
    return isinstance(row.name, int) and row.name < 0


def _elsewhere(row: DecisionRow, side: str, run: Run) -> str:
    """Where the other run computes the tokens of this row."""
    label = f"{_label(row.name, row.sample)}"
    if not isinstance(row.name, int):
        return f"{label} is not in {side}"
    request = run.names.request(row.name)
    digits = str(request).encode()
    for line in run.reader.lines_from(request):
        if line.tag != "launch" or digits not in line.body:
            continue
        event = line.event()
        assert isinstance(event, Launched)
        found = _rows(event, run.names).get((row.name, row.sample))
        if found is not None and found.position <= row.position < found.position + found.num_tokens:
            return (
                f"{side} computes {_work(found)} of {label} at event {event.s}, {seconds(event.ts - run.origin_ns)} "
                f"after the first request, on replica {event.replica}"
            )
    return f"{side} never computes {_work(row)} of {label}"
