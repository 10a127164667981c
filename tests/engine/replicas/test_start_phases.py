"""The phases of a worker's start: what the log has of them, and that they keep a slow start alive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from structlog.testing import CapturingLogger

from eventlm.engine.replicas import start_phases, worker_process
from eventlm.engine.replicas.start_phases import StartPhases
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.worker.protocol import FromWorker, Heartbeat, StartProgress, WorkerReady
from tests.engine.replicas.test_worker_process import SETUP

PROGRESS = [
    StartProgress(epoch=1, phase="reading weights"),
    StartProgress(epoch=1, phase="reading weights", done=5, total=9),
    StartProgress(epoch=1, phase="compiling kernels"),
    StartProgress(epoch=1, phase="compiling kernels", done=1, total=2),
]
READY = WorkerReady(epoch=1, pid=1)


class SlowWorker(WorkerProcess):
    """Says one word after another, each so many seconds of a made-up clock after the one before."""

    words: list[FromWorker]
    gap_s: float
    now_s = 0.0

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        if not self.words or timeout_seconds < self.gap_s:
            self.now_s += timeout_seconds
            raise TimeoutError
        self.now_s += self.gap_s
        return self.words.pop(0)


async def answer_of(monkeypatch: pytest.MonkeyPatch, words: list[FromWorker], *, gap_s: float) -> FromWorker | None:
    """What one who waits for ten seconds gets."""
    worker = SlowWorker(SETUP)
    worker.words, worker.gap_s = words, gap_s
    monkeypatch.setattr(worker_process, "time", SimpleNamespace(monotonic=lambda: worker.now_s))
    try:
        return await worker.answer(10)
    finally:
        await worker.kill()


async def test_a_start_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answer_of(monkeypatch, [*PROGRESS * 50, READY], gap_s=9) == READY


async def test_one_that_shows_no_progress_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await answer_of(monkeypatch, [*PROGRESS, READY], gap_s=11) is None
    beats = [Heartbeat(epoch=1)] * 20
    assert await answer_of(monkeypatch, [PROGRESS[0], *beats, READY], gap_s=1) is None


def test_each_phase_is_a_line_with_its_time_and_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(start_phases, "log", log)
    told: list[StartProgress] = []
    phases = StartPhases(SETUP, told.append)
    for progress in PROGRESS:
        phases.note(progress)
    assert phases.phase == "compiling kernels"
    phases.end()
    assert phases.phase == ""
    assert told == PROGRESS
    assert [(call.method_name, call.args) for call in log.calls] == [("info", ("worker starts",))] * 2
    first, second = (call.kwargs for call in log.calls)
    assert all(line.pop("seconds") >= 0 for line in (first, second))
    whose = {"replica": 0, "epoch": 1}
    assert first == whose | {"phase": "reading weights", "next": "compiling kernels"}
    assert second == whose | {"phase": "compiling kernels"}


def test_a_start_without_phases_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(start_phases, "log", log)
    StartPhases(SETUP).end()
    assert log.calls == []
