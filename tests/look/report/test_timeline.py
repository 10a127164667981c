"""The timeline of a report holds the phases of the index, without holes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eventlm.look.report.measures import measure
from eventlm.look.report.ranks import StageTimes
from eventlm.look.report.timeline import LaunchTimes, request_columns, request_names, stretch_columns, timeline_data
from eventlm.page.timeline import MARKS
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.report.runs import record_with_gap
from tests.look.report.unpacked import columns_of


def test_phases_follow_each_other(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("oscillating_eviction")
    data = timeline_data(index, StageTimes(index), 0)
    intervals, requests = columns_of(data["intervals"]), columns_of(data["requests"])
    assert len(data["names"]) == len(requests["arrived"]) == 400
    same = intervals["request"][1:] == intervals["request"][:-1]
    assert (intervals["start"][1:] == intervals["end"][:-1])[same].all()
    first = np.flatnonzero(np.diff(intervals["request"], prepend=-1))
    assert (intervals["start"][first] == requests["arrived"][intervals["request"][first]]).all()
    marks = columns_of(data["marks"])
    assert (marks["kind"] == MARKS.index("preempted")).sum() == index.requests["preemptions"].sum()
    # Each is where its request was preempted.
    for place in range(0, len(marks["kind"]), 97):
        request = marks["request"][place]
        own = (intervals["request"] == request) & (intervals["phase"] == 3)
        assert marks["time"][place] in intervals["start"][own]


def test_steps_that_ran_while_a_request_waited(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    data = timeline_data(index, StageTimes(index), 0)
    intervals = columns_of(data["intervals"])
    launched = dict(zip(index.steps["step"].tolist(), index.steps["launched_ns"].tolist(), strict=True))
    waits = np.flatnonzero(intervals["phase"] == 0)
    for place in waits[::20].tolist():
        start, end = intervals["start"][place] - 1_000, intervals["end"][place] + 1_000
        for step in range(intervals["first"][place], intervals["last"][place] + 1):
            assert start <= launched[step] <= end
    times = LaunchTimes(index)
    assert times.next_step(np.array([0, 5]), np.array([0, 0])).tolist() == [min(launched), 0]


def test_a_gap_has_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(record_with_gap(tmp_path, 1, monkeypatch))
    data = timeline_data(index, StageTimes(index), 0)
    marks = columns_of(data["marks"])
    (gap,) = np.flatnonzero(marks["kind"] == MARKS.index("gap")).tolist()
    assert marks["until"][gap] >= marks["time"][gap]
    assert any("." in name for name in data["names"])


def test_what_is_known_of_requests(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    measures = measure(index)
    columns = columns_of(request_columns(index, measures))
    assert (columns["ttft"] == measures.ttft // 1000 * 1000).all()
    assert (columns["prompt"] == index.requests["prompt_tokens"]).all()
    stretches = columns_of(stretch_columns(index))
    assert (stretches["last"] >= stretches["first"]).all()
    assert len(request_names(index)) == len(index.requests)
