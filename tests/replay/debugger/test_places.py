"""Places by name are the events that they stand for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Arrived, Finished, Launched, Preempted, StepCompleted
from eventlm.replay.debugger.places import find_place, move_positions, sequence_of
from eventlm.replay.debugger.session import Session
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER
from tests.replay.index.runs import GOLDEN_RUNS


@pytest.mark.parametrize("path", GOLDEN_RUNS, ids=lambda path: path.stem)
def test_places_of_requests_and_steps(path: Path, cache: None) -> None:
    index = open_index(path)
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    admitted: set[tuple[int, int]] = set()
    num_preempted: dict[tuple[int, int], int] = {}
    for event in events:
        if isinstance(event, Arrived):
            assert find_place(index, ["request", str(event.s)]) == event.s
            assert find_place(index, ["request", str(event.s), "arrive"]) == event.s
        elif isinstance(event, Launched):
            assert find_place(index, ["step", f"{event.replica}:{event.step}"]) == event.s
            for request, sample, *_ in event.chunks:
                if (request, sample) not in admitted:
                    admitted.add((request, sample))
                    assert find_place(index, ["request", f"{request}.{sample}", "admit"]) == event.s
        elif isinstance(event, Preempted):
            identity = (event.request, event.index)
            num_preempted[identity] = num_preempted.get(identity, 0) + 1
            words = ["request", f"{event.request}.{event.index}", "preempt", str(num_preempted[identity])]
            assert find_place(index, words) == event.s
        elif isinstance(event, Finished):
            assert find_place(index, ["request", f"{event.request}.{event.index}", "finish"]) == event.s
    assert admitted
    for row in index.requests.rows():
        if row["first_token_ns"] >= 0:
            s = find_place(index, ["request", f"{row['request']}.{row['index']}", "first"])
            assert (events[s].ts, type(events[s]).__struct_config__.tag) == (row["first_token_ns"], "emit")


def test_times_and_ends(cache: None) -> None:
    path = FOLDER / "edf_tight.jsonl"
    index = open_index(path)
    with LogReader(path) as reader:
        times = [line.event().ts for line in reader]
    for ns in [0, 5_999_999, 6_000_000, 30_000_000, 100_000_001, *times]:
        expected = max(s for s, ts in enumerate(times) if ts <= ns)
        found = find_place(index, [f"{ns}ns"])
        assert found == expected
    assert find_place(index, ["start"]) == 0
    assert find_place(index, ["end"]) == len(times) - 1
    assert find_place(index, ["1_00"]) == 100


def test_units_of_moves(cache: None) -> None:
    path = FOLDER / "edf_tight.jsonl"
    index = open_index(path)
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    assert move_positions(index, "launch").tolist() == [each.s for each in events if isinstance(each, Launched)]
    assert move_positions(index, "step").tolist() == [each.s for each in events if isinstance(each, StepCompleted)]
    drains = move_positions(index, "drain").tolist()
    assert all(first < second for first, second in pairwise(drains))
    assert all(getattr(events[s], "p", 0) for s in drains)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "goto needs a place"),
        ("strt", "did you mean start"),
        ("12.5", "is no place"),
        ("999", "there is no event 999; the run has 0 to 196"),
        ("9" * 30, "too large"),
        ("9min", "the run ends at 0.288920 s"),
        ("step", "write step REPLICA:STEP"),
        ("step 0:999", "there is no step 999 of replica 0: its steps are 0 to 43"),
        ("step 7:1", "the run has no step of it"),
        ("mark x", "show marks"),
        ("mark ²", "show marks"),
        ("mark " + "9" * 5000, "a number of 5000 digits is too large for a mark"),
        ("request 92 preempt ²", "'²' is not the number of a preemption"),
        ("mark 99", "there is no mark 99; the run has 7 marks"),
        ("request", "write request N POINT"),
        ("request x", "'x' is no request"),
        ("request 5 first", "has no request 5; .* the nearest is 4"),
        ("request 92.9", "request 92 has no sample 9"),
        ("request 92 frist", "did you mean first"),
        ("request 92 first 2", "only `preempt` takes a number"),
        ("request 99 first", "request 99 had no first token"),
        ("request 99 preempt", "request 99 was never preempted"),
        ("request 4.1 preempt 3", "request 4.1 was preempted 2 times"),
        ("12 13", "is no place"),
    ],
)
def test_mistakes_are_one_clear_line(session: Session, words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        session.execute(f"goto {words}")
    assert "\n" not in str(error.value)
    assert session.position == 0


def test_a_run_without_requests(tmp_path: Path) -> None:
    with LogReader(FOLDER / "edf_tight.jsonl") as reader:
        next(iter(reader))
        end = reader.position
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes((FOLDER / "edf_tight.jsonl").read_bytes()[:end])
    with pytest.raises(UsageError, match="none arrived in it"):
        sequence_of(open_index(empty), "4")
