"""Where `goto` goes: times, events, steps, marks and the points of a request's life, as events of an index."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np

from eventlm.bus.log_reader import LogReader
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.events import Emitted, Event, Finished, Launched, Rejected
from eventlm.formatting import counted
from eventlm.replay.debugger.lines import lines_between
from eventlm.replay.debugger.results import seconds
from eventlm.replay.expressions.syntax import UNITS
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind

_TIME = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)(ns|us|ms|s|min)")
_NUMBER = re.compile(r"[0-9][0-9_,]*")
_MAX_DIGITS = 18
_STEP = re.compile(r"([0-9]+):([0-9]+)")
_SEQUENCE = re.compile(r"([0-9]+)(?:\.([0-9]+))?")
#: The points of a request.
POINTS = ("arrive", "admit", "first", "preempt", "finish")
UNITS_OF_MOVES = ("event", "drain", "step", "launch")
FORMS = "12.5s, an event's number, step R:K, mark K, request N POINT, start or end"


def find_place(index: Index, words: list[str]) -> int:
    """The event of a place. Raises UsageError."""
    if not words:
        raise UsageError(f"goto needs a place: {FORMS}")
    first, last = index.facts.first_s, index.facts.next_s - 1
    text = words[0]
    if text in _NAMED:
        return _NAMED[text](index, words[1:])
    if len(words) > 1:
        raise UsageError(f"{' '.join(words)!r} is no place; give {FORMS}")
    if text == "start":
        return first
    if text == "end":
        return last
    if found := _TIME.fullmatch(text):
        return at_time(index, int(Decimal(found[1].translate(_NO_MARKS)) * UNITS[found[2]]))
    if _NUMBER.fullmatch(text):
        return event_number(index, text)
    hint = did_you_mean(text, ["start", "end", *_NAMED]) if text.isalpha() else ""
    raise UsageError(f"{text!r} is no place{hint or f'; give {FORMS}'}")


def event_number(index: Index, text: str) -> int:
    """An event of the run by its number. Raises UsageError."""
    number = whole_number(text, "an event")
    first, last = index.facts.first_s, index.facts.next_s - 1
    if not first <= number <= last:
        raise UsageError(f"there is no event {number:,}; the run has {first:,} to {last:,}")
    return number


def at_time(index: Index, ns: int) -> int:
    """The last event at or before a time. Raises UsageError beyond the end."""
    if ns > index.facts.last_ns:
        raise UsageError(f"the run ends at {seconds(index.facts.last_ns)}")
    drain = index.drain_at(ns)
    found = index.facts.first_s if drain < 0 else int(index.drains["next_s"][drain]) - 1
    with LogReader(index.path) as reader:
        # Markers follow a drain.
        for line in lines_between(reader, found, index.facts.next_s - 1):
            if line.event().ts > ns:
                break
            found = line.s
    return found


def sequence_of(index: Index, text: str) -> tuple[int, int]:
    """(request, index) of `17` or `17.1`. Raises UsageError for one that the run does not have."""
    found = _SEQUENCE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no request; give the number of its `arrive` event, or NUMBER.INDEX for a sample")
    request, sample = whole_number(found[1], "a request"), whole_number(found[2] or "0", "a sample")
    check_sequence(index, request, sample)
    return request, sample


def check_sequence(index: Index, request: int, sample: int) -> None:
    """Raise UsageError for a sequence that the run does not have."""
    if index.find_row(request, sample) is None:
        if index.find_row(request, 0) is not None:
            raise UsageError(f"request {request} has no sample {sample}")
        raise UsageError(f"{index.path} has no request {request}{_nearest(index, request)}")


def _nearest(index: Index, request: int) -> str:
    known = index.requests["request"]
    if not len(known):
        return ", and none arrived in it"
    nearest = int(known[np.argmin(np.abs(known - request))])
    return f"; a request's number is that of its `arrive` event: the nearest is {nearest}"


def move_positions(index: Index, unit: str) -> Column:
    """The events that `next` and `back` go to by a unit other than `event`, in order."""
    if unit == "drain":
        return index.drains["s"]
    positions = index.steps["done_s" if unit == "step" else "launch_s"]
    return np.unique(positions[positions >= 0])


def _step(index: Index, words: list[str]) -> int:
    found = _STEP.fullmatch(words[0]) if len(words) == 1 else None
    if found is None:
        raise UsageError("write step REPLICA:STEP, such as step 0:17")
    replica, step = whole_number(found[1], "a replica"), whole_number(found[2], "a step")
    row = index.step_row(replica, step)
    if row is None:
        known = index.steps["step"][index.steps["replica"] == replica]
        has = f"its steps are {known.min():,} to {known.max():,}" if len(known) else "the run has no step of it"
        raise UsageError(f"there is no step {step:,} of replica {replica}: {has}")
    launch_s, done_s = (int(index.steps[name][row]) for name in ("launch_s", "done_s"))
    if launch_s < 0 and done_s < 0:
        raise UsageError(f"step {step:,} of replica {replica} was launched before the log begins, and never completed")
    return launch_s if launch_s >= 0 else done_s


def _mark(index: Index, words: list[str]) -> int:
    if len(words) != 1:
        raise UsageError("write mark K with the number that `show marks` gives it")
    number = whole_number(words[0], "a mark, as `show marks` numbers them")
    if number >= len(index.marks):
        raise UsageError(f"there is no mark {number:,}; the run has {counted(len(index.marks), 'mark')}, from 0")
    return int(index.marks["s"][number])


def _request(index: Index, words: list[str]) -> int:
    if len(words) not in (1, 2, 3):
        raise UsageError(f"write request N POINT, where POINT is {', '.join(POINTS)}")
    request, sample = sequence_of(index, words[0])
    point = words[1] if len(words) > 1 else "arrive"
    if point not in POINTS:
        raise UsageError(f"{point!r} is no point of a request{did_you_mean(point, POINTS, listed_as='there are')}")
    if len(words) == 3 and point != "preempt":
        raise UsageError("only `preempt` takes a number: request N preempt K is its K-th preemption, counted from 1")
    row = index.find_row(request, sample)
    assert row is not None
    if point == "arrive":
        if request < index.facts.first_s:
            raise UsageError(f"request {request} arrived before the log begins, with event {index.facts.first_s:,}")
        return request
    if point == "preempt":
        return _preemption(index, request, sample, whole_number(words[2], "a preemption") if len(words) == 3 else 1)
    column = {"admit": "launched_ns", "first": "first_token_ns", "finish": "ended_ns"}[point]
    ts = int(index.requests[column][row])
    found = _find_in_drain(index, ts, _PICKS[point], request, sample) if ts >= 0 else None
    if found is None:
        what = {"admit": "was admitted to no replica", "first": "had no first token", "finish": "did not end"}[point]
        raise UsageError(f"request {words[0]} {what}, as far as the run is recorded")
    return found


def _preemption(index: Index, request: int, sample: int, number: int) -> int:
    marks = index.marks
    is_own = (marks["kind"] == MarkKind.PREEMPTED) & (marks["request"] == request) & (marks["index"] == sample)
    found = marks["s"][is_own]
    if not 1 <= number <= len(found):
        what = f"preempted {counted(len(found), 'time')}" if len(found) else "never preempted"
        raise UsageError(f"request {request}{f'.{sample}' if sample else ''} was {what}")
    return int(found[number - 1])


def _find_in_drain(
    index: Index, ts: int, is_it: Callable[[Index, Event, int, int], bool], request: int, sample: int
) -> int | None:
    """The first event of the drain at a time that fits."""
    drain = index.drain_at(ts)
    if drain < 0:
        return None
    first_s = int(index.drains["next_s"][drain - 1]) if drain else index.facts.first_s
    with LogReader(index.path) as reader:
        for line in lines_between(reader, first_s, int(index.drains["next_s"][drain]) - 1):
            if line.tag in ("launch", "emit", "finish", "reject") and is_it(index, line.event(), request, sample):
                return line.s
    return None


def _admits(index: Index, event: Event, request: int, sample: int) -> bool:
    return isinstance(event, Launched) and any(row[:2] == (request, sample) for row in event.chunks)


def _emits(index: Index, event: Event, request: int, sample: int) -> bool:
    if not isinstance(event, Emitted):
        return False
    row = index.find_row(request, sample)
    return bool((index.stretches["row"][index.members(event.replica, event.step)] == row).any())


def _ends(index: Index, event: Event, request: int, sample: int) -> bool:
    if isinstance(event, Finished):
        return (event.request, event.index) == (request, sample)
    return isinstance(event, Rejected) and event.request == request


def whole_number(text: str, what: str) -> int:
    """A number as commands take it; `_` and `,` may part its digits. what: has that number. Raises UsageError."""
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"{text!r} is not the number of {what}")
    digits = text.translate(_NO_MARKS)
    if len(digits) > _MAX_DIGITS:
        raise UsageError(f"a number of {len(digits)} digits is too large for {what}")
    return int(digits)


_NO_MARKS = str.maketrans("", "", "_,")
_PICKS = {"admit": _admits, "first": _emits, "finish": _ends}
_NAMED: dict[str, Callable[[Index, list[str]], int]] = {"step": _step, "mark": _mark, "request": _request}
