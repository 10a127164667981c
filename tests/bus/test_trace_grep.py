"""Matching lines, against the same question asked of every event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.trace_grep import Query, grep
from eventlm.errors import UsageError
from tests.replay.workload_runs import record

Event = dict[str, Any]


@pytest.fixture(scope="module", params=[5, 10])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in segments, and one in a single file."""
    folder = tmp_path_factory.mktemp("runs")
    record(folder, request.param)
    return folder / f"seed-{request.param}"


def whole_lines(run: Path) -> Iterator[bytes]:
    for path in [*sorted(run.glob("trace-*.jsonl")), run / "trace.jsonl"]:
        yield from path.read_bytes().splitlines(keepends=True)


def expected(run: Path, wanted: Callable[[Event, list[Event]], bool]) -> list[bytes]:
    """Lines whose event, with those that led to it, is wanted."""
    events: dict[int, Event] = {}
    found = []
    for line in whole_lines(run):
        event = msgspec.json.decode(line)
        events[event["s"]] = event
        causes = [event]
        while causes[-1]["t"] in ("done", "emit", "ops"):
            causes.append(events[causes[-1]["c"]])
        if wanted(event, causes):
            found.append(line)
    return found


def found(run: Path, **query: Any) -> list[bytes]:
    with LogReader(run if len(list(run.iterdir())) > 1 else run / "trace.jsonl") as reader:
        return list(grep(reader, Query(**query)))


def names(event: Event, request: int, index: int | None) -> bool:
    rows = [row for name in ("decodes", "chunks", "forget") for row in event.get(name, [])]
    if event["t"] == "preempt" and event.get("by"):
        rows.append(event["by"])
    if event["t"] == "arrive":
        return event["s"] == request
    if event.get("request") == request and (index is None or event.get("index", -1) in (index, -1)):
        return True
    return any(row[0] == request and index in (None, row[1]) for row in rows)


def requests(run: Path) -> list[int]:
    return [msgspec.json.decode(line)["s"] for line in expected(run, lambda event, _: event["t"] == "arrive")]


def test_without_a_question_all_lines_as_they_stand(run: Path) -> None:
    assert found(run) == list(whole_lines(run))


@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_request(run: Path, index: int | None) -> None:
    for request in requests(run)[::3]:
        lines = found(run, request=request, index=index)
        assert lines == expected(run, lambda _, causes, r=request: names(causes[-1], r, index))
        assert b'"t":"arrive"' in lines[0]


def test_a_kind_of_a_request_needs_the_launches_that_are_not_printed(run: Path) -> None:
    request = requests(run)[2]
    for tag in ("done", "emit", "launch", "finish"):
        lines = found(run, request=request, tags=frozenset([tag]))
        assert lines == expected(run, lambda e, causes, t=tag: e["t"] == t and names(causes[-1], request, None))
    assert found(run, request=request, tags=frozenset(["done"]))


def test_a_time_is_found_wherever_it_begins(run: Path) -> None:
    times = sorted({msgspec.json.decode(line)["ts"] for line in whole_lines(run)})
    for first, last in [(times[0], times[3]), (times[7] + 1, times[-1]), (times[-5], times[-2]), (times[-1] + 1, None)]:
        lines = found(run, from_ns=first, to_ns=last)
        assert lines == expected(run, lambda e, _, a=first, b=last: a <= e["ts"] <= (b or 2**53))
    request, middle = requests(run)[0], times[3]
    # Its launches lie before the window, their completions in it.
    assert found(run, request=request, from_ns=middle) == expected(
        run, lambda event, causes: event["ts"] >= middle and names(causes[-1], request, None)
    )


def test_a_cause(run: Path) -> None:
    for cause in (0, 1, requests(run)[1]):
        assert found(run, cause=cause) == expected(
            run, lambda event, _, c=cause: event["c"] == c if "c" in event else not c
        )


def test_what_is_no_request(run: Path) -> None:
    [launch, *_] = (msgspec.json.decode(line) for line in expected(run, lambda event, _: event["t"] == "launch"))
    with pytest.raises(UsageError, match=f"has no request {launch['s']}: event {launch['s']} is `launch`"):
        found(run, request=launch["s"])
    with pytest.raises(UsageError, match="has no request 999999: event 999999 is not in the trace"):
        found(run, request=999999)
