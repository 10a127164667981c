"""The next step of a sequence, found in the lines of a log."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived, Event, Finished, Launched, Preempted
from eventlm.replay.why.next_step import find_next_step
from tests.replay.golden import FOLDER

TRACE = FOLDER / "edf_tight.jsonl"


def events(path: Path) -> list[Event]:
    with LogReader(path) as reader:
        return [line.event() for line in reader]


def test_the_first_step_after_each_arrival() -> None:
    log = events(TRACE)
    num_found = 0
    with LogReader(TRACE) as reader:
        for arrival in [event for event in log if isinstance(event, Arrived)]:
            found = find_next_step(reader, arrival.s - 1, arrival.s, 0)
            rows = [
                event
                for event in log
                if isinstance(event, Launched) and any(row[:2] == (arrival.s, 0) for row in event.chunks)
            ]
            if found is None or found.ended:
                assert not rows
                continue
            assert (found.s, found.step, found.ts) == (rows[0].s, rows[0].step, rows[0].ts)
            assert found.num_tokens > 0
            # Facts of one drain share their time, and the last of them is the cause.
            facts = [event for event in log if found.first_s <= event.s <= found.fact_s]
            assert {event.ts for event in facts} == {found.ts}
            assert found.fact_s == rows[0].c
            num_found += 1
    assert num_found > 5


def test_who_left_in_the_drain_before() -> None:
    log = events(TRACE)
    preempted = [event for event in log if isinstance(event, Preempted)]
    num_seen = 0
    with LogReader(TRACE) as reader:
        for decision in preempted:
            if decision.by is None or decision.reason != "admission":
                continue
            # It was admitted in the place of the other.
            found = find_next_step(reader, decision.c - 1, *decision.by)
            assert found is not None
            assert found.ts == decision.ts
            left = [each for each in found.departures if each.sequence == (decision.request, decision.index)]
            assert [each.how for each in left] == ["preempted: admission"]
            num_seen += 1
    assert num_seen > 0


def test_steps_of_the_drain_itself_are_not_later() -> None:
    launches = [event for event in events(TRACE) if isinstance(event, Launched) and event.chunks]
    num_found = 0
    with LogReader(TRACE) as reader:
        for launched in launches:
            request, index = launched.chunks[0][:2]
            # The drain's last fact, its last decision before the launch, and the launch.
            found = [find_next_step(reader, s, request, index) for s in (launched.c, launched.s - 1, launched.s)]
            assert found[0] == found[1] == found[2]
            if found[0] is not None:
                assert found[0].s > launched.s
                assert found[0].fact_s > launched.c
                num_found += 1
    assert num_found > 5


def test_one_that_ends_before_and_one_that_is_not_found() -> None:
    end = next(event for event in events(TRACE) if isinstance(event, Finished))
    with LogReader(TRACE) as reader:
        found = find_next_step(reader, end.c - 1, end.request, end.index)
        assert found is not None
        assert (found.ended, found.s, found.step, found.departures) == (end.reason, end.s, -1, [])
        assert find_next_step(reader, end.s, end.request, end.index) is None
        assert find_next_step(reader, 0, end.request, end.index, max_lines=2) is None
