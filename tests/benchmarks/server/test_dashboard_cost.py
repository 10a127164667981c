"""What watchers cost: that each case is measured, and that differences are taken within a round."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks.server import dashboard_cost
from benchmarks.server.dashboard_cost import Measured, differences


def test_differences_are_within_a_round() -> None:
    gaps = np.array([1_000_000] * 100)
    measured = [
        Measured(8, 0, 99.0, 2 * gaps, 11.0),
        Measured(0, 0, 100.0, gaps, 10.0),
        Measured(0, 1, 50.0, gaps, 10.0),
        Measured(8, 1, 51.0, gaps, 10.0),
    ]
    [first, second] = differences(measured, 8)
    assert first == pytest.approx((-1.0, 10.0, 1.0))
    assert second == pytest.approx((2.0, 0.0, 0.0))


@pytest.mark.soak
def test_every_case_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "8", "--rounds", "2", "--seconds", "1"]
    monkeypatch.setattr(sys, "argv", ["dashboard_cost.py", *flags])
    assert dashboard_cost.main() == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["0", "1", "8", "1", "8", "idle"]
    assert all(float(row.split()[1].replace(",", "")) > 100 for row in rows[:3])
