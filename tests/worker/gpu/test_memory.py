"""How many KV blocks fit beside a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from eventlm.models.config import kv_bytes_per_token, read_model
from eventlm.models.spec import ModelSpec
from eventlm.types import OnProgress
from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.gpu import memory
from eventlm.worker.gpu.device import IS_INTERPRETED
from eventlm.worker.gpu.memory import MeasuredMemory, graph_bytes, num_blocks_beside, size_cache
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.start_report import (
    CAPTURING_GRAPHS,
    COMPILING_KERNELS,
    MEASURING_MEMORY,
    READING_WEIGHTS,
    TORCH_COMPILE,
    StartReport,
)
from tests.worker.gpu.driven import gpu_runner, small_checkpoint

GIB, MIB = 1 << 30, 1 << 20
BLOCK = 1 << 20


def blocks(*, share_ppm: int = 900_000, needed: int = 2, **changes: int) -> int:
    figures = {"total": 80 * GIB, "free": 60 * GIB, "taken": 20 * GIB, "activations": 2 * GIB, "graphs": GIB}
    measured = MeasuredMemory(**{**figures, **changes})
    return num_blocks_beside(measured, share_ppm=share_ppm, block_bytes=BLOCK, num_blocks_needed=needed)


def test_the_cache_gets_what_the_model_and_its_largest_step_leave_of_the_share() -> None:
    assert blocks() == (72 - 20 - 2 - 1) * 1024
    assert blocks(share_ppm=500_000) == (40 - 20 - 2 - 1) * 1024


def test_the_cache_gets_no_more_than_is_free() -> None:
    assert blocks(free=10 * GIB) == (10 - 2 - 1) * 1024


def test_a_model_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(CacheMemoryError) as caught:
        blocks(taken=71 * GIB, free=9 * GIB, needed=5)
    message = str(caught.value)
    for figure in ("81,920 MiB", "73,728 MiB", "72,704 MiB", "2,048 MiB", "1,024 MiB", "5 MiB", "--max-model-len"):
        assert figure in message
    assert "other programs" not in message


def test_what_others_take_is_named() -> None:
    with pytest.raises(CacheMemoryError, match="30,720 MiB are taken by other programs"):
        blocks(taken=49 * GIB, free=GIB, needed=5)


class Phases:
    """Those that a start has told, and the last count of each."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        self.report = StartReport(self._note)

    def _note(self, phase: str, done: int, total: int) -> None:
        self.counts[phase] = (done, total)


class MadeUpForward:
    """Of a GPU: it compiles and captures nothing."""

    kv_dtype = "float32"

    def __init__(self, model: ModelSpec, *, can_capture: bool) -> None:
        self.model = model
        self.can_capture = can_capture

    def compile_gain(self) -> str:
        return "much"

    def capture(self, buckets: list[int], on_progress: OnProgress) -> int:
        if self.can_capture:
            on_progress(len(buckets), len(buckets))
        return 0


def test_a_start_reports_what_there_is_to_do(tmp_path: Path) -> None:
    """The interpreter has only weights to read."""
    setup = gpu_runner(small_checkpoint(tmp_path)).setup
    assert setup.graph_buckets
    phases = Phases()
    GpuRunner(setup, phases.report)
    assert list(phases.counts) == [READING_WEIGHTS, *([] if IS_INTERPRETED else [COMPILING_KERNELS, CAPTURING_GRAPHS])]
    for done, total in phases.counts.values():
        assert done == total > 0


@pytest.mark.parametrize("can_capture", [True, False])
def test_a_gpu_s_start_reports_its_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_capture: bool) -> None:
    runner = gpu_runner(small_checkpoint(tmp_path), graph_buckets=[1, 2])
    model = read_model(tmp_path)
    block_bytes = 16 * kv_bytes_per_token(model, "float32")
    made_up: Any = SimpleNamespace(
        setup=structs.replace(runner.setup, num_blocks=0, torch_compile=True),
        forward=MadeUpForward(model, can_capture=can_capture),
        device=SimpleNamespace(type="cuda"),
        config=runner.config,
        notes=[],
        open_table=lambda num_blocks: None,
        # Another rank has less room.
        agree=lambda num_blocks: num_blocks - 2,
    )
    monkeypatch.setattr(memory, "_taken", lambda device: 0)
    monkeypatch.setattr(memory, "_measure", lambda runner: MeasuredMemory(50 * block_bytes, 40 * block_bytes, 0, 0, 0))
    monkeypatch.setattr(memory, "warm_kernels", lambda runner, on_progress: on_progress(7, 7))
    phases = Phases()
    assert size_cache(made_up, phases.report).num_blocks == 38
    assert made_up.notes == ["much"]
    expected = {TORCH_COMPILE: (0, 0), MEASURING_MEMORY: (0, 0), COMPILING_KERNELS: (7, 7)}
    assert phases.counts == expected | ({CAPTURING_GRAPHS: (2, 2)} if can_capture else {})
    assert list(phases.counts)[:3] == list(expected)


class Captures:
    """What captures take where the first of all has a library take 64 MiB: 40 of a largest graph, 3 more of each."""

    def __init__(self) -> None:
        self._library = 64 * MIB

    def capture(self, buckets: list[int]) -> int:
        library, self._library = self._library, 0
        return library + 40 * MIB + 3 * MIB * (len(buckets) - 1)


def test_graphs_are_counted_without_what_libraries_keep() -> None:
    for buckets in ([1, 2, 4, 8], [1, 2], [1]):
        setup, forward = SimpleNamespace(graph_buckets=buckets), Captures()
        runner: Any = SimpleNamespace(setup=setup, forward=forward)
        assert graph_bytes(runner) == forward.capture(buckets)


def test_without_graphs_none_are_counted() -> None:
    runner: Any = SimpleNamespace(setup=SimpleNamespace(graph_buckets=[]))
    assert graph_bytes(runner) == 0
