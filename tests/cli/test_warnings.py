"""Warnings go to stderr, one line each."""

from __future__ import annotations

import pytest

from eventlm.cli.warnings import warn


def test_each_warning_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    warn(["no clean end", "a torn last line"])
    warn([])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "eventlm: warning: no clean end\neventlm: warning: a torn last line\n"
