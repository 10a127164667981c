"""The memory of a GPU's KV cache."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.gpu.runner import GpuRunner
from tests.worker.gpu.driven import Asked, Driven, gpu_runner, small_checkpoint
from tests.worker.gpu.test_runner import GREEDY, prompt_of


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> GpuRunner:
    folder: Path = small_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return gpu_runner(folder)


@pytest.mark.parametrize("backend", ["triton", "torch_sdpa"])
def test_blocks_are_given_back_before_others_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    runner = gpu_runner(small_checkpoint(tmp_path), attention_backend=backend)
    Driven(runner, [Asked(prompt_of(5), 2, GREEDY)])
    before = weakref.ref(runner.cache.kv)
    zeros = torch.zeros

    def take(*shape: Any, **options: Any) -> torch.Tensor:
        assert before() is None
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", take)
    runner.open_table(3)
    assert runner.cache.num_blocks == 3


def test_a_cache_that_does_not_fit_is_refused(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has\nmore to say")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(
            CacheMemoryError, match=r"1000 blocks of 16 tokens.*Tried to allocate 9.00 GiB.*--num-blocks"
        ):
            runner.open_table(1000)
    runner.open_table(32)


@pytest.mark.parametrize("backend", ["triton", "torch_sdpa"])
def test_what_overflowed_in_a_sequence_before_spoils_none(tmp_path: Path, backend: str) -> None:
    runner = gpu_runner(small_checkpoint(tmp_path), attention_backend=backend)
    # Beside a longer sequence of as many blocks, as a prompt and as decodes.
    asked = [Asked(prompt_of(17), 6, GREEDY), Asked(prompt_of(23), 3, GREEDY)]
    expected = Driven(runner, asked).outputs
    runner.cache.kv.fill_(torch.nan)
    assert Driven(runner, asked).outputs == expected
