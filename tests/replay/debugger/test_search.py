"""Every kind of search against brute force over a straight replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.replay.debugger import search as search_module
from eventlm.replay.debugger.condition import Condition
from eventlm.replay.debugger.search import Mode
from eventlm.replay.debugger.session import Session
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.system.system import real_system
from tests.replay.debugger.straight import StraightReplay
from tests.replay.golden import FOLDER
from tests.replay.index.runs import GOLDEN_RUNS
from tests.replay.index.test_live import append, bodies

COLUMNS = [
    "free < 3",
    "free < 5 and running > 2",
    "replica == 0 and waiting > 0",
    "not (held > 2 or cached == 0)",
    "oldest_wait > 1ms",
    "live - running * 2 >= 1",
    "partial > 0 or in_flight == 2 and time > 60ms",
    "waiting / running > 0",
]
LINES = [
    'event == "preempt"',
    'event == "launch" and tokens > 2',
    'event != "launch" and replica == 0',
    "request == 4",
    'request == 4 and event == "finish"',
    "s > 40 and s < 44",
    "not (cause < 40) and chunks > 0",
    'event == "arrive" and (priority > 0 or class == "gold")',
    "by == 4",
    'reason == "memory"',
    "decodes + chunks >= 3",
    'event == "emit" and free < 3',
]
CORE = [
    "req(4).tokens > 22",
    "seq(4, 0).skips > 0 or policy == 'fcfs'",
    "timers > 0",
    "replica(0).free < 2 and not paused",
]
BOTH = [
    'event == "launch" and req(4).live',
    "step > 20 and replica(0).free == 0",
    "tokens > 1 and waiting + timers > 0",
]
WATCHED = ["running", "free < 3", "req(4).tokens", "policy", "replica(0).next_step / 4", "oldest_wait"]


def hits(values: list[tuple[int, tuple[Any, ...]]], mode: Mode) -> list[int]:
    found = []
    before: tuple[Any, ...] = ()
    for s, now in values:
        if mode == "change":
            if now != before and (before or any(value is not None for value in now)):
                found.append(s)
        elif any(now) and (mode == "level" or not any(before)):
            found.append(s)
        before = now
    return found


def check(session: Session, text: str, values: list[tuple[int, tuple[Any, ...]]], mode: Mode) -> int:
    expected = hits(values, mode)
    searcher, condition = session._searcher, Condition(text)
    first_s, last_s = session.events.first_s, session.events.last_s
    found = []
    at: int | None = first_s - 1
    while at is not None and (at := searcher.next(condition, at, last_s, mode)) is not None:
        found.append(at)
    assert found == expected, text
    found, at = [], last_s + 1
    while at is not None and (at := searcher.previous(condition, at, mode)) is not None:
        found.append(at)
    assert found[::-1] == expected, text
    # From between hits, where an edge must not be taken for one again.
    for s in range(first_s, last_s, (last_s - first_s) // 4):
        later = next((each for each in expected if each > s), None)
        assert searcher.next(condition, s, last_s, mode) == later, (text, s)
        earlier = next((each for each in reversed(expected) if each < s), None)
        assert searcher.previous(condition, s, mode) == earlier, (text, s)
    return len(expected)


@pytest.fixture(scope="module", params=[1, 3], ids=lambda number: GOLDEN_RUNS[number].stem)
def run(request: pytest.FixtureRequest) -> Path:
    path: Path = GOLDEN_RUNS[request.param]
    return path


@pytest.fixture
def opened(run: Path, cache: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setattr(search_module, "_BLOCK", 50)
    with Session.open(run) as session:
        yield session


@pytest.mark.parametrize("text", COLUMNS)
def test_gauges(opened: Session, run: Path, text: str) -> None:
    assert Condition(text).source == "columns"
    values = StraightReplay(run).values(text, "columns")
    check(opened, text, values, "level")
    check(opened, text, [(s, (any(each),)) for s, each in values], "edge")


@pytest.mark.parametrize("text", LINES)
def test_events(opened: Session, run: Path, text: str) -> None:
    assert Condition(text).source == "lines"
    check(opened, text, StraightReplay(run).values(text, "lines"), "level")


@pytest.mark.parametrize("text", CORE)
def test_states(opened: Session, run: Path, text: str) -> None:
    assert Condition(text).source == "core"
    values = StraightReplay(run).values(text, "core")
    check(opened, text, [(s, each[:1]) for s, each in values], "level")
    check(opened, text, [(s, each[:1]) for s, each in values], "edge")


@pytest.mark.parametrize("text", BOTH)
def test_events_with_states(opened: Session, run: Path, text: str) -> None:
    values = StraightReplay(run).values(text, "both")
    check(opened, text, values, "level")


@pytest.mark.parametrize("text", WATCHED)
def test_changes(opened: Session, run: Path, text: str) -> None:
    source = Condition(text).source
    values = StraightReplay(run).values(text, source)
    if source == "core":
        values = [(s, each[:1]) for s, each in values]
    check(opened, text, values, "change")


def test_most_of_them_are_found_somewhere(opened: Session) -> None:
    """Otherwise the comparisons would say little."""
    texts = [*COLUMNS, *LINES, *CORE, *BOTH]
    found = [opened.search(Condition(text), mode="level", forward=True) for text in texts]
    assert sum(each is not None for each in found) > 20


def test_gauges_hold_for_the_replica_of_an_event(cache: None) -> None:
    path = FOLDER / "lrs_dying_workers.jsonl"
    with Session.open(path) as session:
        assert session.index.header.core.num_replicas > 1
        for text in ('event == "launch" and running < 2', "replica == 1 and running > 0", "running > 1"):
            condition = Condition(text)
            values = StraightReplay(path).values(text, condition.source)
            assert check(session, text, values, "level") > 0
        # `live` is the same for all of them.
        assert session.execute("find live > 3 and replica == 1").to_object()["s"] == 9


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("free and running > 1", 1),
        ('free == "x"', 6),
        ("event > 5", 7),
        ("request + 1", 9),
        ("free < 3 or req(17).skips > 200", 13),
        ("seq(92, 7).live", 1),
        ('head_cause == "blokcs"', 15),
    ],
)
def test_errors_have_a_column(session: Session, text: str, column: int) -> None:
    with pytest.raises(ExpressionError) as error:
        session.execute(f"find {text}")
    assert (error.value.column, error.value.source) == (column, text)
    assert session.position == 0


def test_requests_that_are_still_to_come_or_not_recorded(tmp_path: Path, lossy_runs: list[Path], cache: None) -> None:
    source = FOLDER / "edf_tight.jsonl"
    with LogWriter(real_system(), tmp_path, "run") as writer:
        append(writer, bodies(source)[:60])
        with Session.open(writer.run_folder) as session:
            session.execute("break req(92).live")
            with pytest.raises(ExpressionError, match=r"column 1 .* has no request 17; .* the nearest is"):
                session.execute("break req(17).live")
            append(writer, bodies(source)[60:])
            assert session.execute("cont").to_object()["s"] == 92
    with Session.open(lossy_runs[0]) as session:
        session.execute(f"break req({session.events.gaps[0][0]}).live")


def test_what_a_log_alone_does_not_know(cache: None) -> None:
    with Session.open(GOLDEN_RUNS[0], verify=False) as session:
        with pytest.raises(ExpressionError, match="free is not known: the run was not verified"):
            session.execute("find waiting > 0 and free < 2")
        with pytest.raises(UsageError, match="needs states: the run was not verified"):
            session.execute("find req(2).tokens > 2")
        session.execute("find running > 0")
        session.execute('find event == "launch"')
