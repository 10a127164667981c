"""`eventlm report` as a user runs it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.cli.main import main
from tests.replay.golden import BROKEN, FOLDER

EDF = str(FOLDER / "edf_tight.jsonl")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    assert main(["report", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("eventlm: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    assert main(["report", EDF, EDF, "--policy", "fcfs", "--open"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("report.html: ")
    page = tmp_path / "report.html"
    assert page.read_text().startswith("<!doctype html>")
    assert page.stat().st_mode & 0o777 == 0o600
    assert opened == [page.as_uri()]


def test_a_part_and_without_verification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "part.html")
    assert main(["report", EDF, "--from", "0.02", "--to", "0.05", "--no-verify", "-o", page]) == 0
    captured = capsys.readouterr()
    assert "--no-verify" in captured.err
    assert Path(page).is_file()


def test_a_part_without_requests_is_not_called_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LogReader(EDF) as reader:
        last_ns = max(line.event().ts for line in reader)
    page = str(tmp_path / "part.html")
    assert main(["report", EDF, "--from", f"{last_ns}ns", "-o", page]) == 0
    assert "no request arrived" in capsys.readouterr().out
    assert "last event" in refused(capsys, EDF, "--from", f"{last_ns + 1}ns", "-o", page, code=2)


def test_runs_that_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "page.html")
    assert "--no-verify" in refused(capsys, str(FOLDER / f"{BROKEN}.jsonl"), "-o", page, code=10)
    refused(capsys, str(tmp_path / "none.jsonl"), "-o", page, code=2)
    lines = Path(EDF).read_bytes().splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes(b"".join([*lines[:60], b"{}\n", *lines[61:]]))
    assert "line 61" in refused(capsys, str(damaged), "-o", page, code=3)
    assert main(["report", str(damaged), "--partial", "-o", page]) == 0
    assert "line 61" in capsys.readouterr().err


def test_files_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder" in refused(capsys, EDF, "-o", str(tmp_path), code=2)
    assert "there is no folder" in refused(capsys, EDF, "-o", str(tmp_path / "none" / "page.html"), code=2)
    assert "No space left" in refused(capsys, EDF, "-o", "/dev/full", code=1)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nonesuch" in refused(capsys, EDF, "--policy", "nonesuch", code=2)
    refused(capsys, EDF, "--from", "never", code=2)


def test_the_trace_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    content = Path(EDF).read_bytes()
    trace.write_bytes(content)
    for arguments in ([str(trace), "-o", str(trace)], [EDF, str(trace), "-o", str(trace)]):
        assert "would replace what is read" in refused(capsys, *arguments, code=2)
    assert trace.read_bytes() == content


def test_a_window_without_requests_but_with_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "report.html")
    assert main(["report", str(FOLDER / "fcfs_one_replica.jsonl"), "--from", "0.02", "--to", "0.05", "-o", output]) == 0
    capsys.readouterr()
