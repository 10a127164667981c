"""The picture of long contexts on KV groups, of fewer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.simulated import long_context_groups


def test_the_picture_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output", str(tmp_path), "--contexts", "16384,131072", "--groups", "1,2,4"]
    monkeypatch.setattr(sys, "argv", ["long_context_groups.py", *flags])
    assert long_context_groups.main() == 0
    first, _, short, long = capsys.readouterr().out.splitlines()
    assert "simulated" in first
    *_, two, four = short.split()[1::2]
    assert two == four, "it has two shards"
    alone, two, four = long.split()[1::2]
    # Half of what is not weights, and then half of that again.
    assert (float(alone) - float(two)) / (float(two) - float(four)) == pytest.approx(2, rel=0.35)
    assert (tmp_path / "long_context_groups.png").stat().st_size > 10_000
