"""What a worker says when a GPU fails, is full, or cannot be compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from transformers import Lfm2Config

from eventlm.errors import UsageError
from eventlm.events.codec import encode_body
from eventlm.system.clock import SystemClock
from eventlm.worker.gpu.device import GpuError, Mark
from eventlm.worker.gpu.forward import GpuForward
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.loop import WorkerLoop
from eventlm.worker.protocol import WorkerFailed, WorkerReady, encode
from tests.worker.gpu.driven import gpu_runner, small_checkpoint
from tests.worker.launches import launched, new_sequence, payload

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")
UNFIT = triton.CompilationError("def kernel(): part()", None, None)  # type: ignore[arg-type]
UNFIT.__cause__ = triton.CompilationError("def part(): pass", None, "out of registers")  # type: ignore[arg-type]
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later")
SAID = [
    (FULL, r"memory is full: 2\.00 GiB more are needed(, and [\d,]+ of [\d,]+ MiB are free)?; lower --gpu-memory-util"),
    (UNFIT, r"a kernel does not compile for this GPU \(.+, Triton .*out of registers.*torch_sdpa"),
    (LOST, r"the GPU or its driver failed: CUDA error: an illegal memory access was encountered; .*nvidia-smi"),
]
LAUNCH = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [0])])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path)


def fail(error: Exception) -> Any:
    def raise_it(*arguments: object, **keywords: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(("error", "message"), SAID)
@pytest.mark.parametrize("part", ["__init__", "resize_cache", "capture"])
def test_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception, message: str) -> None:
    monkeypatch.setattr(GpuForward, part, fail(error))
    with pytest.raises(GpuError, match=message):
        gpu_runner(folder)


def test_a_model_that_only_processors_run(folder: Path) -> None:
    layers = ["conv", "full_attention"]
    Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=2, layer_types=layers).save_pretrained(folder)
    message = (
        "GPUs cannot run this Lfm2ForCausalLM: it has layers with a state in place of attention; take --device cpu"
    )
    with pytest.raises(UsageError, match=message):
        gpu_runner(folder)


class FailingEvent:
    """Of a device on which something went wrong."""

    record = query = synchronize = fail(LOST)


def say(runner: GpuRunner, *, num_answers: int = 0) -> WorkerFailed:
    """What a worker with this runner says of a step that fails."""
    loop = WorkerLoop(WorkerReady(epoch=1, pid=1), runner, SystemClock(), print)  # type: ignore[arg-type]
    answers = list(loop.take([encode_body(LAUNCH), encode(payload(new_sequence(1, [5, 6, 7])))]))
    for _ in range(num_answers):
        assert answers == []
        while loop.is_running():
            pass
        answers += loop.answer()
    (failed,) = answers
    assert isinstance(failed, WorkerFailed)
    assert loop.exit_status == 1
    return failed


@pytest.mark.parametrize(("error", "message"), SAID)
def test_while_a_step_is_launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    runner = gpu_runner(folder)
    monkeypatch.setattr(runner.forward, "run", fail(error))
    failed = say(runner)
    assert not failed.exit_code
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.message)
    # Where it was, for the log.
    assert "in _launch" in failed.traceback


def test_while_a_step_is_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner(folder)
    launch = Mark.__init__

    def mark(self: Mark, device: torch.device) -> None:
        launch(self, device)
        self._event = FailingEvent()  # type: ignore[assignment]

    monkeypatch.setattr(Mark, "__init__", mark)
    failed = say(runner, num_answers=1)
    assert failed.message.startswith("the GPU or its driver failed: CUDA error: an illegal memory access")
    assert "in settle" in failed.traceback


def test_a_defect_is_not_taken_for_the_gpu_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner(folder)
    monkeypatch.setattr(runner.forward, "run", fail(RuntimeError("shapes differ in client's words")))
    failed = say(runner)
    assert failed.message == "RuntimeError"
    assert "client" not in failed.traceback
