"""The bar of an engine's start."""

from __future__ import annotations

import io
import sys

import pytest

from eventlm.cli.output import count_progress, start_progress, warn
from eventlm.worker.protocol import StartProgress


class Terminal(io.StringIO):
    """In the place of standard error."""

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


def test_it_says_what_a_worker_does_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with start_progress(1) as on_progress:
        assert on_progress is not None
        assert "starting …" in terminal.getvalue()
        on_progress(0, StartProgress(epoch=1, phase="compiling kernels"))
        assert terminal.getvalue().split("\r")[-1].startswith("compiling kernels …")
        on_progress(0, StartProgress(epoch=1, phase="compiling kernels", done=1, total=4))
        assert terminal.getvalue().split("\r")[-1].startswith("compiling kernels:  25%|")
        on_progress(0, StartProgress(epoch=1, phase="measuring steps"))
        assert terminal.getvalue().split("\r")[-1].startswith("measuring steps …")
    # Nothing of it stays.
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-2].strip() == terminal.getvalue().split("\r")[-1] == ""


def test_several_workers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with start_progress(2) as on_progress:
        assert on_progress is not None
        on_progress(1, StartProgress(epoch=1, phase="reading weights"))
    assert "replica 1: reading weights …" in terminal.getvalue()


def test_bytes_are_shown_in_multiples(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with count_progress("reading", "byte"):
        assert "reading: 0.00B" in terminal.getvalue()


def test_without_a_terminal_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with start_progress(1) as on_progress:
        assert on_progress is None
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_each_warning_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    warn(["no clean end", "a torn last line"])
    warn([])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "eventlm: warning: no clean end\neventlm: warning: a torn last line\n"
