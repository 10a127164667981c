from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import ExitCode, TornTraceError, UsageError
from eventlm.events import Event, Preempted
from eventlm.replay.bisect.first_event import FoundEvent, first_event, first_event_of_index
from eventlm.replay.debugger.condition import Condition
from eventlm.replay.debugger.session import Session
from eventlm.replay.expressions.errors import ExpressionError
from tests.replay.debugger.conftest import lossy_runs
from tests.replay.debugger.straight import StraightReplay, events_of
from tests.replay.golden import FOLDER
from tests.replay.index.conftest import cache, shared_cache

__all__ = ["cache", "lossy_runs", "shared_cache"]

GOLDEN = FOLDER / "edf_tight.jsonl"


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return events_of(GOLDEN)


def found_in_log(text: str) -> FoundEvent:
    condition = Condition(text)
    assert condition.is_of_events
    return first_event(GOLDEN, condition)


def test_the_first_event_is_found(events: list[Event]) -> None:
    preemptions = [event for event in events if isinstance(event, Preempted)]
    assert len(preemptions) > 1
    found = found_in_log("event == 'preempt'")
    assert found.event == preemptions[0]
    assert found.num_events == preemptions[0].s + 1
    last = preemptions[-1]
    later = found_in_log(f"event == 'preempt' and request == {last.request} and time >= {last.ts}ns")
    assert later.event == last
    assert found_in_log(f"time >= {last.ts}ns").event == next(event for event in events if event.ts >= last.ts)


def test_fields_lists_and_scheduling_parameters() -> None:
    launch = found_in_log("event == 'launch' and decodes > 1 and blocks > 0").event
    assert launch is not None
    assert len(launch.decodes) > 1  # type: ignore[attr-defined]
    assert len(launch.blocks) > 0  # type: ignore[attr-defined]
    arrival = found_in_log("deadline_ns > 0 and prompt_tokens > 1 and slo_ttft_ns == 0").event
    assert arrival is not None
    assert arrival.scheduling.deadline_ns > 0  # type: ignore[attr-defined]


def test_where_it_holds_nowhere(events: list[Event]) -> None:
    found = found_in_log("request == 999_999")
    assert (found.event, found.num_events) == (None, len(events))


@pytest.mark.parametrize(
    "text",
    ["free < 3 and running > 1", "event == 'emit' and free < 3", "req(4).tokens > 22", "timers > 0", "free > 10_000"],
)
def test_gauges_and_states(cache: None, events: list[Event], text: str) -> None:
    condition = Condition(text)
    assert not condition.is_of_events
    values = StraightReplay(GOLDEN).values(text, condition.source)
    expected = next((s for s, each in values if any(each)), None)
    assert (expected is None) == (text == "free > 10_000")
    with Session.open(GOLDEN) as session:
        # Wherever the session stands.
        session.execute("goto 50")
        found = first_event_of_index(session, condition)
    assert found.event == (None if expected is None else events[expected])
    assert found.num_events == (len(events) if expected is None else expected + 1)


def test_in_a_run_with_gaps(cache: None, lossy_runs: list[Path]) -> None:
    for path in lossy_runs:
        all_events = events_of(path)
        with Session.open(path) as session:
            found = first_event_of_index(session, Condition(f"s == {all_events[-1].s} and live >= 0"))
            nowhere = first_event_of_index(session, Condition("running > 10_000"))
            assert nowhere.warnings == session.index.facts.warnings
        assert (found.event, found.num_events) == (all_events[-1], len(all_events))
        assert (nowhere.event, nowhere.num_events) == (None, len(all_events))


def test_a_torn_trace(cache: None, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(GOLDEN.read_bytes()[:20_000])
    with LogReader(torn) as log:
        assert sum(1 for _ in log) > 10
    condition = Condition("running > 0")
    with Session.open(torn) as session:
        found = first_event_of_index(session, condition)
        assert found.event is not None
        assert "torn" in found.warnings[0]
        with pytest.raises(TornTraceError) as error:
            first_event_of_index(session, condition, strict=True)
    assert error.value.exit_code == ExitCode.TORN


def test_without_states(cache: None) -> None:
    with Session.open(GOLDEN, verify=False) as session:
        found = first_event_of_index(session, Condition("running > 0"))
        assert found.event is not None
        assert "was not verified" in found.warnings[-1]
        with pytest.raises(ExpressionError, match="free is not known"):
            first_event_of_index(session, Condition("free < 3"))
        with pytest.raises(UsageError, match="needs states"):
            first_event_of_index(session, Condition("req(4).tokens > 22"))
