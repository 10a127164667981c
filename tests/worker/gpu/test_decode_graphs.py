"""Graphs of decodes, captured on a GPU that is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.worker.gpu import forward as forward_module
from eventlm.worker.gpu.decode_graphs import DecodeGraphs
from eventlm.worker.gpu.step_inputs import decode_views
from tests.worker.gpu.driven import Asked, Driven, gpu_runner, small_checkpoint
from tests.worker.gpu.test_runner import GREEDY, prompt_of

CUDA = torch.device("cuda", 0)
TOTAL = 1000


class MadeUpGpu:
    """Its memory: what graphs hold, and what the allocator keeps of tensors that are gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
        self.kept, self.of_graphs = kept, 0
        self.log: list[str] = []
        gpu = self

        class Graph:
            def pool(self) -> int:
                return 1

            def replay(self) -> None:
                gpu.log.append("replay")

        @contextmanager
        def capture(graph: Graph, pool: int | None = None) -> Iterator[None]:
            gpu.log.append("capture")
            # As torch does.
            gpu.kept = 0
            gpu.of_graphs += 7 if pool else 50
            yield

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(gpu, "kept", 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - gpu.kept - gpu.of_graphs, TOTAL))

    def compute(self, bucket: int) -> torch.Tensor:
        self.log.append(f"compute {bucket}")
        return torch.full((bucket,), bucket)


@pytest.mark.parametrize("kept", [0, 300])
def test_graphs_cost_what_they_take_whatever_the_allocator_keeps(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    gpu = MadeUpGpu(monkeypatch, kept)
    told: list[tuple[int, int]] = []
    graphs = DecodeGraphs([1, 4, 2], lambda bucket: None, gpu.compute, CUDA, lambda *counts: told.append(counts))
    assert graphs.num_bytes == 50 + 7 + 7
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_each_is_captured_after_runs_over_padding_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = MadeUpGpu(monkeypatch, 0)
    graphs = DecodeGraphs([1, 4], lambda bucket: gpu.log.append(f"padding {bucket}"), gpu.compute, CUDA)
    runs = ["padding {0}", "compute {0}", "compute {0}", "capture", "compute {0}"]
    assert gpu.log == [word.format(bucket) for bucket in (4, 1) for word in runs]
    gpu.log.clear()
    assert graphs(4).tolist() == [4] * 4
    assert gpu.log == ["replay"]
    assert graphs(3).tolist() == [3] * 3
    assert gpu.log == ["replay", "compute 3"]


def test_padding_covers_what_other_steps_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner(small_checkpoint(tmp_path))
    Driven(runner, [Asked(prompt_of(9), 2, GREEDY)])
    found: list[list[list[int]]] = []

    def capture(buckets: list[int], stage_padding: Callable[[int], None], *arguments: Any) -> DecodeGraphs:
        for bucket in buckets:
            runner.forward.staging._device.fill_(-(2**30))
            stage_padding(bucket)
            found.append([column.tolist() for column in decode_views(runner.forward.staging, bucket)])
        return DecodeGraphs(buckets, stage_padding, *arguments)

    monkeypatch.setattr(forward_module, "DecodeGraphs", capture)
    runner.forward.capture([1, 8])
    # Token 0 at position 0 of no sequence, whose length is 0, one after the other.
    assert found == [[[0] * rows, [0] * rows, [-1] * rows, [0] * rows, list(range(rows))] for rows in (1, 8)]
