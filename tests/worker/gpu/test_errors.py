"""What a worker says when a GPU fails, is full, or cannot be compiled for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import zmq

from eventlm.events.codec import encode_body
from eventlm.worker.gpu import marks
from eventlm.worker.gpu.device import GpuError
from eventlm.worker.gpu.forward import GpuForward
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.process import Worker
from eventlm.worker.protocol import WorkerFailed, decode_from_worker, encode
from tests.worker.gpu.driven import gpu_runner, small_checkpoint
from tests.worker.launches import launched, new_sequence, payload

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB")
UNFIT = triton.CompilationError("def kernel(): pass", None, "out of registers")  # type: ignore[arg-type]
LOST = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later")
SAID = [
    (FULL, r"memory is full: .*2\.00 GiB more are needed; lower --gpu-memory-utilization"),
    (UNFIT, r"a kernel does not compile for this GPU \(Triton's interpreter.*out of registers.*torch_sdpa"),
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


class FailingEvent:
    """Of a device on which something went wrong."""

    record = query = synchronize = fail(LOST)


def say(runner: GpuRunner, folder: Path, *, num_answers: int = 0) -> WorkerFailed:
    """What a worker with this runner says of a step that fails."""
    worker = Worker(f"ipc://{folder}/in", f"ipc://{folder}/out", os.getpid())
    engine = zmq.Context().socket(zmq.PULL)
    engine.bind(f"ipc://{folder}/out")
    try:
        frames = [encode_body(LAUNCH), encode(payload(new_sequence(1, [5, 6, 7])))]
        assert worker._start(1, runner, frames) is bool(num_answers)  # type: ignore[arg-type]
        for _ in range(num_answers):
            assert worker._receive(runner) == []  # type: ignore[arg-type]
            assert not worker._answer(1)
        assert engine.poll(10_000)
        failed = decode_from_worker(engine.recv())
        assert isinstance(failed, WorkerFailed)
        return failed
    finally:
        engine.context.destroy(linger=0)
        worker._context.destroy(linger=0)


@pytest.mark.parametrize(("error", "message"), SAID)
def test_while_a_step_is_launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    runner = gpu_runner(folder)
    monkeypatch.setattr(runner.forward, "run", fail(error))
    failed = say(runner, folder)
    assert not failed.exit_code
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failed.message)
    # Where it was, for the log.
    assert "in _launch" in failed.traceback


def test_while_a_step_is_under_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner(folder)
    launch = marks.Mark.__init__

    def mark(self: marks.Mark, device: torch.device) -> None:
        launch(self, device)
        self._event = FailingEvent()  # type: ignore[assignment]

    monkeypatch.setattr(marks.Mark, "__init__", mark)
    failed = say(runner, folder, num_answers=1)
    assert failed.message.startswith("the GPU or its driver failed: CUDA error: an illegal memory access")
    assert "in settle" in failed.traceback


def test_a_defect_is_not_taken_for_the_gpu_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = gpu_runner(folder)
    monkeypatch.setattr(runner.forward, "run", fail(RuntimeError("shapes differ in client's words")))
    failed = say(runner, folder)
    assert failed.message == "RuntimeError"
    assert "client" not in failed.traceback
