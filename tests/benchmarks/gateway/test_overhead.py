"""What going through the gateway costs: that every way is measured, and that differences are taken within a round."""

from __future__ import annotations

import sys

import pytest

from benchmarks.gateway import overhead
from benchmarks.gateway.overhead import DIRECT, PROXY, Measured, rows


def measured(ttft: tuple[float, float], **us: float) -> Measured:
    return Measured(1000.0, ttft, us | {"backend": 1.0, "client": 2.0})


def test_first_tokens_are_compared_within_a_round() -> None:
    found = [
        {DIRECT: measured((20.0, 30.0)), "gateway": measured((21.0, 33.0), engine=50.0)},
        {"gateway": measured((31.5, 60.0), engine=40.0), DIRECT: measured((30.0, 50.0))},
    ]
    direct, gateway = rows(found)
    assert direct == (DIRECT, "1,000", "25.0", "40.0", "", "", "", "1.0", "2.0", "")
    assert gateway == ("gateway", "1,000", "26.2", "46.5", "1.25", "6.50", "45.0", "1.0", "2.0", "22,222")


@pytest.mark.soak
def test_every_way_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "4", "--requests", "8", "--tokens", "8", "--token-ms", "5", "--rounds", "1"]
    many = ["--many-backends", "3", "--many-streams", "6", "--many-tokens", "4", "--many-token-ms", "50"]
    monkeypatch.setattr(sys, "argv", ["overhead.py", "--loads", "paced", "many", *flags, *many])
    assert overhead.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:22].strip() for line in lines[4:8]] == [DIRECT, PROXY, "gateway", "gateway, 1 front end"]
    assert all(float(line.split()[1].replace(",", "")) > 1 for line in lines[10:14] if line.startswith("both"))
    assert [line.split("  ")[0] for line in lines[11:14]] == ["both", "engine", "front end 1"]
