"""The picture of the Azure hour, on a workload of a few requests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.simulated import azure_picture
from eventlm.replay.workload.file import read_workload
from tests.replay.workload_files import write_made_workload


@pytest.mark.soak
def test_the_picture_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = write_made_workload(tmp_path / "W.jsonl", num_requests=15, prompt_tokens=100)
    flags = ["--loads", "1", "--long-loads", "2", "--long-share", "0.5", "--long-tokens", "5000"]
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["azure_picture.py", workload, "--output", str(output), *flags])
    assert azure_picture.main() == 0
    printed = capsys.readouterr().out
    # Nine configurations under one load, for each of two workloads.
    assert sum(line.startswith(("fcfs ", "edf ", "lrs ")) for line in printed.splitlines()) == 18
    assert "with a prompt of 5,000 tokens beside 50.0% of its requests (added)" in printed
    assert 10_000 < (output / "azure.png").stat().st_size < 300_000
    lengths = [request.arrival.prompt_tokens for request in read_workload(output / "with_long_prompts.jsonl").requests]
    assert 0 < lengths.count(5000) == len(lengths) - 15
