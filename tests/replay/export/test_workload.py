from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import TornTraceError, UsageError
from eventlm.replay.export.workload import export_workload
from eventlm.replay.workload.file import read_workload
from eventlm.replay.workload.source import load_workload
from eventlm.types import TimeWindow
from tests.replay.golden import FOLDER

GOLDEN = FOLDER / "edf_tight.jsonl"


def test_a_run_becomes_a_workload(tmp_path: Path) -> None:
    found = export_workload(GOLDEN, tmp_path / "w.jsonl")
    workload = read_workload(tmp_path / "w.jsonl")
    loaded = load_workload(GOLDEN, with_incidents=True)
    assert found.num_requests == len(workload.requests) == len(loaded.workload.requests)
    assert found.num_incidents == len(workload.incidents) > 0
    assert workload.recorded == loaded.workload.recorded
    assert [each.outputs for each in workload.requests] == [each.outputs for each in loaded.workload.requests]
    [note] = found.notes
    assert "drawn from the others" in note


def test_a_window_has_what_arrived_in_it(tmp_path: Path) -> None:
    arrivals = [each.arrival_ns for each in load_workload(GOLDEN).workload.requests]
    middle_ns = arrivals[len(arrivals) // 2]
    export_workload(GOLDEN, tmp_path / "w.jsonl", window=TimeWindow(middle_ns, None))
    assert [each.arrival_ns for each in read_workload(tmp_path / "w.jsonl").requests] == [
        each for each in arrivals if each >= middle_ns
    ]
    with pytest.raises(UsageError, match="no request arrived in the window"):
        export_workload(GOLDEN, tmp_path / "w.jsonl", window=TimeWindow(arrivals[-1] + 1, None))


def test_a_torn_trace_is_warned_of(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(GOLDEN.read_bytes()[:20_000])
    [warning] = export_workload(torn, tmp_path / "w.jsonl").warnings
    assert "torn" in warning
    assert load_workload(torn).warnings == (warning,)
    with pytest.raises(TornTraceError):
        export_workload(torn, tmp_path / "w.jsonl", strict=True)
