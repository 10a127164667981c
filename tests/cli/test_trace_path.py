"""Which trace a path, a name or nothing stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.cli.trace_path import LATEST, trace_file
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces

OLD, MIDDLE, NEW = "20250101-000000-aaaaaa", "20250102-000000-aaaaaa", "20250103-000000-aaaaaa"


def begin(folder: Path, run: str) -> LogWriter:
    writer = LogWriter(real_system(), folder, run)
    writer.append(encode_body(traces.header()))
    writer.flush()
    return writer


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "runs"


def test_a_run_that_is_still_being_written_goes_before_newer_ones(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(runs, OLD).close()
    running = begin(runs, MIDDLE)
    newest = begin(runs, NEW)
    assert trace_file(LATEST) == str(newest.path)
    newest.close()
    capsys.readouterr()
    assert trace_file(LATEST) == str(running.path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"eventlm: run {MIDDLE}, still running\n"
    running.close()
    assert trace_file(LATEST) == str(newest.path)
    assert NEW in capsys.readouterr().err


def test_a_run_that_is_named_is_not_announced(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with begin(runs, OLD) as writer:
        assert trace_file(OLD) == str(writer.path)
    assert capsys.readouterr().err == ""
