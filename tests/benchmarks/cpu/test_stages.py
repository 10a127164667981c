"""A pipeline is never faster than its slowest stage."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cpu.stages import measure
from tests.checkpoints import make_checkpoint


def test_no_rate_is_above_its_bound(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, num_layers=2)
    [(stages, worker)] = measure(str(model), num_clients=4, num_stages=2, num_tokens=64, rounds=1)
    assert 0 < stages.measured <= stages.bound * 1.02
    assert 0 < worker.measured <= worker.bound * 1.02
