"""What HTTP costs, on a load that says nothing but that it was served."""

from __future__ import annotations

import sys

import pytest

from benchmarks.server import front_end_cost


@pytest.mark.soak
def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "8", "--tokens", "64", "--requests", "64", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["front_end_cost.py", *flags])
    assert front_end_cost.main() == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row[:16].strip() for row in rows] == ["engine alone", "in one process", "1 front end", "2 front ends"]
    assert all(float(row[16:26].replace(",", "")) > 100 for row in rows)
