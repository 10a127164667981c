"""What the timeline of a page draws: rows of requests, the phases they went through, and what happened to them.

`timeline.js` draws what `pack_timeline` packs. All times are in ns from the start of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike

from eventlm.page.columns import pack_columns

#: What a request can be doing; codes are places in this list. A `stalled` one is admitted, but in no step. An exchange
#: is of a step, on its way to a lane. The last three are of a request that another server has, or had.
PHASES = (
    *("waiting", "prefill", "decode", "preempted", "recompute", "swapped", "stalled", "exchange"),
    *("first token there", "streaming", "retry"),
)
#: What can happen; codes are places in this list. A gap is a stretch of which nothing was recorded.
MARKS = (
    *("preempted", "swapped out", "worker lost", "gap", "rejected", "failed", "cancelled"),
    *("attempt failed", "backend down", "engine down"),
)

_REQUESTS = ("arrived", "ended", "replica", "class")
_INTERVALS = ("request", "phase", "start", "end", "first", "last")
_STEPS = ("replica", "step", "start")
_MARKS = ("kind", "time", "until", "request", "replica", "step")
_LANES = ("lane", "step", "phase", "tokens", "most", "start", "end", "came")


def pack_timeline(
    *,
    requests: Mapping[str, ArrayLike],
    names: Sequence[str],
    classes: Sequence[str],
    intervals: Mapping[str, ArrayLike],
    steps: Mapping[str, ArrayLike],
    marks: Mapping[str, ArrayLike],
    end_ns: int,
    unit_ns: int = 1,
    lanes: Mapping[str, ArrayLike] | None = None,
    lane_names: Sequence[str] = (),
    lane_nouns: Sequence[str] = (),
) -> dict[str, Any]:
    """The data of a timeline as an object for JSON.

    requests: in any order, one row each: `arrived`, `ended` (of one that has not: end_ns), `replica` (-1: none yet) and
        `class`, a place in `classes`. `slot` may be added, where the run has numbered slots. names: one for each.
    intervals: by request, then by start: `request` (its row), `phase` (its place in PHASES), `start` and `end`, `first`
        and `last` step of the request's replica that they span. While a request waits, these are the steps that ran
        meanwhile; `last` is `first - 1` if there was none.
    steps: by replica, then by number: `replica`, `step`, `start`.
    marks: `kind` (its place in MARKS), `time`, `until` (the same, unless it lasted), `request` and `replica` (-1: it
        concerns all), `step`.
    unit_ns: times are rounded down to multiples of it, which makes the page smaller.
    lanes: what is drawn above the requests, by lane, then by start: `lane` (its place in lane_names), `step`, `phase`
        (its place in PHASES), `start` and `end`, `came` (since when the step could have begun in this lane), `tokens`
        and `most` (of a step that several lanes share, the lane's, and the most that one of them has; else 0).
        lane_nouns: what `step` numbers in each lane: "step", as in all if it is empty, or "request".

    Raises ValueError for columns that are missing, out of order or out of range.
    """
    tables = {"requests": requests, "intervals": intervals, "steps": steps, "marks": marks}
    needed = {"requests": _REQUESTS, "intervals": _INTERVALS, "steps": _STEPS, "marks": _MARKS}
    if lanes is not None:
        tables["lanes"], needed["lanes"] = lanes, _LANES
    arrays = {table: {name: numpy.asarray(each) for name, each in tables[table].items()} for table in tables}
    for table, names_of_table in needed.items():
        missing = [name for name in names_of_table if name not in arrays[table]]
        if missing:
            raise ValueError(f"{table} have no column {', '.join(missing)}")
    _check_order("intervals", arrays["intervals"]["request"], arrays["intervals"]["start"])
    _check_order("steps", arrays["steps"]["replica"], arrays["steps"]["step"])
    num_requests = len(arrays["requests"]["arrived"])
    _check_range("intervals", "request", arrays["intervals"]["request"], 0, num_requests)
    _check_range("intervals", "phase", arrays["intervals"]["phase"], 0, len(PHASES))
    _check_range("requests", "class", arrays["requests"]["class"], 0, len(classes))
    _check_range("marks", "kind", arrays["marks"]["kind"], 0, len(MARKS))
    _check_range("marks", "request", arrays["marks"]["request"], -1, num_requests)
    if lanes is not None:
        _check_order("lanes", arrays["lanes"]["lane"], arrays["lanes"]["start"])
        _check_range("lanes", "lane", arrays["lanes"]["lane"], 0, len(lane_names))
        _check_range("lanes", "phase", arrays["lanes"]["phase"], 0, len(PHASES))
    if len(names) != num_requests:
        raise ValueError(f"{len(names)} names for {num_requests} requests")
    units = dict.fromkeys(("arrived", "ended", "start", "end", "time", "until", "came"), unit_ns)
    relative_to = {"ended": "arrived", "end": "start", "last": "first", "until": "time", "came": "start"}
    packed = {
        table: pack_columns(
            columns, relative_to={name: other for name, other in relative_to.items() if name in columns}, units=units
        )
        for table, columns in arrays.items()
    }
    shown = {"end": end_ns, "names": list(names), "classes": list(classes), **packed}
    if lanes is None:
        return shown
    return shown | {"laneNames": list(lane_names), "laneNouns": list(lane_nouns) or ["step"] * len(lane_names)}


def _check_order(table: str, first: Any, second: Any) -> None:
    steps = numpy.diff(first)
    if (steps < 0).any() or (numpy.diff(second)[steps == 0] < 0).any():
        raise ValueError(f"{table} are not in order")


def _check_range(table: str, name: str, values: Any, least: int, end: int) -> None:
    if len(values) and (values.min() < least or values.max() >= end):
        raise ValueError(f"{table}: {name} must be from {least} to {end - 1}")
