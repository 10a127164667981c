"""What exporting spans costs: that both cases are measured."""

from __future__ import annotations

import sys

import pytest

from benchmarks.server import otlp_cost


@pytest.mark.soak
def test_both_cases_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    flags = ["--streams", "8", "--rounds", "2", "--seconds", "1", "--port", str(unused_tcp_port)]
    monkeypatch.setattr(sys, "argv", ["otlp_cost.py", *flags])
    assert otlp_cost.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:5]] == ["no", "yes"]
    assert all(float(line.split()[1].replace(",", "")) > 100 for line in lines[3:5])
