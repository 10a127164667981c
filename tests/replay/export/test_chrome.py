"""Chrome's JSON: asynchronous events of a sequence nest, and steps of a track do not overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.replay.export.timeline import export_timeline
from eventlm.replay.index.open import open_index
from tests.replay.golden import FOLDER
from tests.replay.index.runs import record_ranks
from tests.telemetry.test_phases import folded

Events = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["edf_tight", "lrs_dying_workers"])
def trace(request: pytest.FixtureRequest) -> Path:
    return FOLDER / f"{request.param}.jsonl"


def exported(trace: Path, folder: Path) -> Events:
    export_timeline(trace, folder / "run.json", to="chrome")
    found = json.loads((folder / "run.json").read_text())
    assert found["displayTimeUnit"] == "ms"
    events: Events = found["traceEvents"]
    return events


def test_events_of_a_sequence_nest(trace: Path, tmp_path: Path) -> None:
    recorder = folded(trace)
    stacks: dict[str, list[tuple[str, float]]] = {}
    phases: dict[str, list[tuple[str, float, float]]] = {}
    ended: dict[str, str] = {}
    num_chunks = 0
    for event in exported(trace, tmp_path):
        if event["ph"] not in "bne":
            continue
        stack = stacks.setdefault(event["id"], [])
        if event["ph"] == "b":
            assert not stack or event["ts"] >= stack[-1][1]
            stack.append((event["name"], event["ts"]))
            num_chunks += event["name"] == "chunk"
        elif event["ph"] == "e":
            name, start = stack.pop()
            assert name == event["name"]
            assert start <= event["ts"]
            if not stack:
                ended[event["id"]] = event["args"]["outcome"]
            elif len(stack) == 1:
                phases.setdefault(event["id"], []).append((name, start, event["ts"]))
    assert not any(stacks.values())
    assert sorted(ended.values()) == sorted(outcome for outcome, _ in recorder.outcomes.values())
    assert num_chunks == sum(map(len, recorder.chunks.values()))
    expected = [[(name, a / 1000, b / 1000) for name, a, b in each] for each in recorder.phases.values()]
    assert sorted(phases.values()) == sorted(filter(None, expected))


def test_steps_of_a_track_do_not_overlap(trace: Path, tmp_path: Path) -> None:
    steps = [event for event in exported(trace, tmp_path) if event["ph"] == "X"]
    recorder = folded(trace)
    assert {event["args"]["event"] for event in steps} == {step.launched.s for step in recorder.steps}
    ends: dict[tuple[int, int], float] = {}
    for event in steps:
        track = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(track, 0) - 1e-3
        ends[track] = event["ts"] + event["dur"]


def test_times_keep_their_nanoseconds(trace: Path, tmp_path: Path) -> None:
    ends = {round(event["ts"] * 1000) for event in exported(trace, tmp_path) if event["ph"] == "e"}
    assert ends >= {ns for _, ns in folded(trace).outcomes.values()}


def test_stages_have_tracks_with_names(tmp_path: Path) -> None:
    trace = record_ranks(tmp_path)
    events = exported(trace, tmp_path)
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.items()) == [((2 + n, 1000 + s), f"stage {s}") for n in range(3) for s in range(3)]
    found = {
        (event["pid"] - 2, event["tid"] - 1000, event["name"]): (event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X" and event["tid"] >= 1000
    }
    stages = open_index(trace).stages
    assert len(found) == len(stages)
    for row in stages.rows():
        times = found[row["replica"], row["stage"], f"step {row['step']}"]
        assert times == (row["start_ns"] / 1000, (row["end_ns"] - row["start_ns"]) / 1000)
