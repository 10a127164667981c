"""What stores configurations: see `benchmarks/kernels/tune.py`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from benchmarks.kernels import matmul
from benchmarks.kernels import tune as module
from benchmarks.kernels.tune import Config, Tuning, store
from eventlm.kernels.gpu import tuned

REPOSITORY = Path(__file__).parents[2]
GOOD, SLOW, WRONG, BROKEN = {"BLOCK": 1}, {"BLOCK": 2}, {"BLOCK": 3}, {"BLOCK": 4}
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
SECONDS = {1: 1e-3, 2: 5e-3, 3: 1e-6}


def run(config: Config) -> Tensor:
    if config == BROKEN:
        raise RuntimeError("out of resource: shared memory\nmore")
    return torch.ones(3) * (2 if config == WRONG else 1)


def choice(current: Config, candidates: list[Config]) -> Tuning:
    return Tuning("an op", "op", [{"max_rows": 8}, {"dtype": "x"}], current, candidates, [run], [lambda: torch.ones(3)])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a file with configurations, while runs take the seconds above."""
    path = tmp_path / "tuned.toml"
    path.write_text('# Head.\n\n[[op]]\ngpu = "default"\nconfig = { BLOCK = 2 }\n')
    monkeypatch.setattr(tuned, "gpu_name", lambda: "Big")

    def seconds(run: Any, **options: Any) -> float:
        [config] = run.args
        return SECONDS[config["BLOCK"]]

    monkeypatch.setattr(module, "median_seconds", seconds)
    return path


def tuned_with(path: Path, deadline: float, current: Config, candidates: list[Config]) -> list[str]:
    return list(module._tune(choice(current, candidates), deadline, path))


def test_the_fastest_that_is_right_is_stored(path: Path) -> None:
    lines = tuned_with(path, float("inf"), SLOW, [SLOW, WRONG, BROKEN, GOOD])
    assert lines == [
        "an op: {'BLOCK': 3}: ValueError: its relative error is 1",
        "an op: {'BLOCK': 4}: RuntimeError: out of resource: shared memory",
        "an op: 1000.0 us, 5000.0 us before, of 2: {'BLOCK': 1}",
    ]
    assert path.read_text().endswith(
        '[[op]]\ngpu = "Big"\nshape = { dtype = "x" }\nconfig = { BLOCK = 1 }\n\n'
        '[[op]]\ngpu = "Big"\nshape = { max_rows = 8 }\nconfig = { BLOCK = 1 }\n'
    )


def test_without_time_all_stays_as_it_is(path: Path) -> None:
    before = path.read_text()
    assert tuned_with(path, 0.0, SLOW, [GOOD]) == ["an op: no time for 2 of 2"]
    assert tuned_with(path, float("inf"), BROKEN, []) == [
        "an op: {'BLOCK': 4}: RuntimeError: out of resource: shared memory"
    ]
    assert path.read_text() == before


def test_it_runs_through_and_a_smoke_run_stores_nothing() -> None:
    before = tuned.PATH.read_text()
    command = [sys.executable, "benchmarks/gpu.py", "--smoke", "--tune"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    operations = ["decode_attention", "grouped_gemm", "matmul", "packed_matmul", "prefill_attention"]
    assert [line.partition(",")[0].partition(" N=")[0] for line in lines] == operations
    assert all(" us before, of " in line for line in lines)
    assert tuned.PATH.read_text() == before


def test_only_rows_of_the_weight_choose() -> None:
    """With T among the keys, the product would not be invariant to the batch."""

    def keys() -> Iterator[str]:
        for each in matmul.tunings(DEVICE, smoke=True):
            for shape in each.shapes:
                yield from shape

    assert set(keys()) <= {"dtype", "max_N"}


def test_an_entry_is_stored_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "PATH", path)
    store("op", {"max_rows": 16}, {"BLOCK": 3}, gpu="Big", path=path)
    assert tuned.tuned("op", rows=16) == {"BLOCK": 3}
    store("op", {"max_rows": 16}, {"BLOCK": 7}, gpu="Big", path=path)
    assert tuned.tuned("op", rows=16) == {"BLOCK": 7}
    store("new", {}, {"num_warps": 4}, gpu='A "GPU"', path=path)
    store("new", {}, {"num_warps": 8}, gpu="default", path=path)
    assert tuned.tuned("new") == {"num_warps": 8}
    written = path.read_text()
    assert written.count("[[op]]") == 2
    assert written.startswith('# Head.\n\n[[new]]\ngpu = "default"\nconfig = { num_warps = 8 }\n\n')
    store("op", {"max_rows": 16}, {"BLOCK": 7}, gpu="Big", path=path)
    assert path.read_text() == written
    assert [file.name for file in path.parent.iterdir()] == ["tuned.toml"]
    monkeypatch.undo()
    tuned._entries.cache_clear()
    tuned.tuned.cache_clear()
