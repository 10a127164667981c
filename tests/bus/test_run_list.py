"""The runs of a folder, told by their headers and last lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventlm.bus import run_list
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import TRACE_NAME, closed_name
from eventlm.bus.run_list import RunSummary, list_runs
from eventlm.bus.trace_info import info
from eventlm.errors import UsageError
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces
from tests.replay.workload_runs import record


def at(run: str, day: int) -> dict[str, str]:
    return {"run": run, "unix_start_ns": str(1_735_689_600_000_000_000 + day * 86_400_000_000_000)}


def write_run(folder: Path, run: str, day: int, *, num_events: int = 20, end: bool = True) -> Path:
    made = traces.events(num_events, end=end)
    made[0] = traces.header(**at(run, day))
    path = folder / run / TRACE_NAME
    path.parent.mkdir(parents=True)
    traces.write(path, made)
    return path


def by_name(found: list[RunSummary]) -> dict[str, RunSummary]:
    return {run.run: run for run in found}


def test_the_newest_is_last_and_a_link_is_no_run_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, "b", 1)
    write_run(tmp_path, "a", 2)
    write_run(tmp_path, "c", 0)
    (tmp_path / "latest").symlink_to("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    found = list_runs(tmp_path)
    assert [run.run for run in found] == ["c", "b", "a"]
    assert [run.num_events for run in found] == [20] * 3
    assert [run.duration_ns for run in found] == [20_000] * 3
    assert found[0].num_requests is None
    assert [run.run for run in list_runs(tmp_path / "a")] == ["a"]
    assert [run.run for run in list_runs(tmp_path / "latest")] == ["a"]


def test_how_each_ended(tmp_path: Path) -> None:
    write_run(tmp_path, "whole", 0)
    write_run(tmp_path, "killed", 1, end=False)
    torn = write_run(tmp_path, "torn", 2)
    torn.write_bytes(torn.read_bytes()[:-5])
    header_only = write_run(tmp_path, "begun", 3, num_events=1, end=False)
    damaged = write_run(tmp_path, "damaged", 4)
    damaged.write_bytes(b"x" + damaged.read_bytes())
    other = write_run(tmp_path, "other", 5)
    previous = traces.events(3)
    previous[0] = traces.header(**at("other", 5), behaviour=0)
    traces.write(other, previous)
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / TRACE_NAME).touch()
    writer = LogWriter(real_system(), tmp_path, "live")
    for event in traces.events(5, end=False):
        writer.append(encode_body(event))
    writer.flush()
    found = by_name(list_runs(tmp_path))
    writer.close()
    assert {name: run.end for name, run in found.items()} == {
        "whole": "end",
        "killed": "no_end",
        "torn": "torn",
        "begun": "no_end",
        "damaged": "unreadable",
        "other": "another_version",
        "hollow": "unreadable",
        "live": "still_being_written",
    }
    assert found["torn"].num_events == 19
    assert found["begun"].num_events == 1
    assert header_only.stat().st_size == found["begun"].num_bytes
    assert "is damaged at line 1" in found["damaged"].problem
    assert "behaviour 0" in found["other"].problem


def test_only_a_little_of_a_long_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, "long", 0, num_events=5000)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    [run] = list_runs(tmp_path)
    assert (run.end, run.num_events) == ("end", 5000)
    [read] = list_runs(tmp_path, full=True)
    assert read.end == "unreadable"
    # A last line that is longer than what is read at first.
    monkeypatch.setattr(run_list, "_TAIL_BYTES", 8)
    [again] = list_runs(tmp_path)
    assert again == run


def test_segments_count_as_one_run_and_full_reads_them_all(tmp_path: Path) -> None:
    record(tmp_path, 5)
    run = tmp_path / "seed-5"
    [quick], [full] = list_runs(tmp_path), list_runs(tmp_path, full=True)
    known = info(run)
    assert quick.num_segments == known.check.num_segments > 1
    assert quick.num_events == full.num_events == known.check.num_events
    assert quick.num_bytes == known.check.num_bytes
    assert (full.num_requests, full.num_rejected) == (known.num_requests, known.num_rejected)
    assert full.num_finished == sum(known.finish_reasons.values()) > 0
    assert quick.duration_ns == known.duration_ns
    # A writer that died between giving the last segment its two names.
    os.link(run / TRACE_NAME, run / closed_name(10**6))
    assert list_runs(tmp_path)[0].num_bytes == quick.num_bytes


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot list the runs of .*nothing: No such file"):
        list_runs(tmp_path / "nothing")
