"""Ranks on other hosts: their clocks are mapped, and they leave when the engine is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.config import ParallelConfig, WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.events import Launched, StepCompleted, WorkerLost
from eventlm.system.clock_map import ClockMap
from eventlm.system.system import real_system
from eventlm.worker.protocol import StepResult
from tests.engine.engines import FAKE, expected_tokens, fake_setup, generate, recorded, request, verified
from tests.engine.replicas.test_rank_group import scripted
from tests.launchers.loopback import LoopbackLauncher
from tests.processes import is_running, until

HOUR_NS = 3_600 * 10**9
MILLISECOND = 1_000_000


async def test_times_of_another_clock_are_mapped(tmp_path: Path) -> None:
    launcher = {"type": "tests.launchers.loopback:LoopbackLauncher", "skew_ns": HOUR_NS}
    parallel = ParallelConfig(tensor_parallel_size=2, launcher=launcher)
    engine = InferenceEngine(fake_setup(record=tmp_path, parallel=parallel), real_system())
    assert engine.setup.launcher == LoopbackLauncher(skew_ns=HOUR_NS)
    try:
        await engine.start()
        [pids] = engine.rank_pids
        [reader] = await generate(engine, request(20))
        assert reader.tokens == [expected_tokens(5, 0, 20)]
    finally:
        await engine.stop()
    assert not any(map(is_running, pids))
    events = recorded(engine)
    launches = {event.step: event for event in events if isinstance(event, Launched)}
    results = [event for event in events if isinstance(event, StepCompleted)]
    assert len(results) == 20
    for result in results:
        # A round trip on this host is far shorter than the error that is allowed here.
        assert launches[result.step].ts - 50 * MILLISECOND < result.start_ns
        assert result.end_ns < result.ts + 50 * MILLISECOND
        assert result.end_ns - result.start_ns == FAKE["base_ns"]
    verified(engine)


async def test_ranks_leave_when_the_engine_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"type": "tests.launchers.loopback:LoopbackLauncher"}
    parallel = ParallelConfig(tensor_parallel_size=2, launcher=launcher)
    worker = WorkerConfig(heartbeat_timeout_seconds=2, max_restarts=0)
    engine = InferenceEngine(fake_setup(record=tmp_path, parallel=parallel, worker=worker), real_system())
    try:
        await engine.start()
        [pids] = engine.rank_pids
        monkeypatch.setattr(WorkerProcess, "pulse", lambda self: None)
        await until(lambda: not any(map(is_running, pids)))
        await until(lambda: engine.state == "dead")
    finally:
        await engine.stop()
    [lost] = [event for event in recorded(engine) if isinstance(event, WorkerLost)]
    assert lost.reason == "on elsewhere: died (exit code 1)"


async def test_each_stage_has_the_clock_of_its_host() -> None:
    group = scripted([[], [], [], []])
    for worker, skew_ns in zip(group._workers, (100, 100, 7_000, 7_000), strict=True):
        worker.clock = ClockMap()
        worker.clock.note(sent_ns=0, there_ns=skew_ns, received_ns=0)
    result = StepResult(epoch=1, step=0, start_ns=0, end_ns=7_030, tokens=[], stages=[(110, 119), (7_021, 7_030)])
    group._pulsing = group  # type: ignore[assignment]
    mapped = group._on_our_clock(2, result)
    assert isinstance(mapped, StepResult)
    assert (mapped.start_ns, mapped.end_ns, mapped.stages) == (10, 30, [(10, 19), (21, 30)])
