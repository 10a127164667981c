"""The picture of a long prompt over stages, on a shorter one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.simulated import long_prompt_stages


def test_the_picture_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output", str(tmp_path), "--tokens", "100000", "--stages", "1,4"]
    monkeypatch.setattr(sys, "argv", ["long_prompt_stages.py", *flags])
    assert long_prompt_stages.main() == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert "simulated" in first
    assert [row.split()[:2] for row in rows] == [[each, name] for name in ("fixed", "dynamic") for each in "14"]
    # 25 chunks over 4 stages take 28/25 of a quarter.
    assert float(rows[1].split()[-1]) == pytest.approx(4 * 25 / 28, rel=0.06)
    assert (tmp_path / "long_prompt_stages.png").stat().st_size > 10_000
