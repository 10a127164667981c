"""A start in which the workers say how many KV blocks they have: all that follows from it goes by that number."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec import structs
from structlog.testing import CapturingLogger, capture_logs

from eventlm.engine.block_names import PAIRS_PER_BLOCK
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.replicas import controller as replica_module
from eventlm.engine.replicas import rank_group
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import ContextLengthError
from eventlm.engine.setup import EngineSetup
from eventlm.errors import UsageError
from eventlm.events import Header
from eventlm.system.system import System, real_system
from eventlm.worker.protocol import FromWorker, StartProgress, WorkerReady, WorkerSetup
from tests.engine.engines import Reader, fake_setup, generate, recorded, request, verified
from tests.processes import running_children


class ProfilingWorker(WorkerProcess):
    """A fake worker that finds room for so many blocks where it is not told how many."""

    #: By replica.
    room: ClassVar[list[int]] = [40, 30]
    #: Of every worker that was started.
    setups: ClassVar[list[WorkerSetup]] = []

    def __init__(self, system: System, setup: WorkerSetup) -> None:
        self.setups.append(setup)
        super().__init__(system, structs.replace(setup, num_blocks=setup.num_blocks or self.room[setup.replica]))

    async def answer(
        self, timeout_seconds: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> FromWorker | None:
        message = await super().answer(timeout_seconds, on_progress)
        if isinstance(message, WorkerReady):
            notes = [f"measured in epoch {self.setup.epoch}"]
            return structs.replace(message, num_blocks=self.setup.num_blocks, notes=notes)
        return message


@pytest.fixture(autouse=True)
def _profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProfilingWorker, "setups", [])
    monkeypatch.setattr(rank_group, "WorkerProcess", ProfilingWorker)


def unsized(setup: EngineSetup, *, asked: int = 0, longest: int = 512) -> EngineSetup:
    """A setup that leaves the blocks to the workers."""
    core = structs.replace(setup.core, num_blocks=0, max_model_len=asked or longest)
    model = structs.replace(setup.config.model, max_model_len=asked)
    return structs.replace(setup, core=core, config=structs.replace(setup.config, model=model))


async def test_a_run_goes_by_the_fewest_blocks(tmp_path: Path) -> None:
    engine = InferenceEngine(unsized(fake_setup(record=tmp_path, replicas=2)), real_system())
    assert engine.max_model_len == 512
    try:
        with capture_logs() as logs:
            await engine.start()
        await generate(engine, request(4))
        with pytest.raises(ContextLengthError, match="464"):
            await engine.submit([request(464)])
    finally:
        await engine.stop()
    # One block less than there are.
    core = engine.setup.core
    assert (core.num_blocks, core.max_model_len, engine.max_model_len) == (30, 464, 464)
    header = recorded(engine)[0]
    assert isinstance(header, Header)
    assert header.core == core
    assert header.block_table_size == PAIRS_PER_BLOCK * 30
    assert [setup.num_blocks for setup in ProfilingWorker.setups] == [0, 0]
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "the context is cut from 512 to 464 tokens, which 30 KV blocks hold; raise --kv-memory for more"
    ]
    verified(engine)


async def test_a_worker_s_start_report_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(replica_module, "log", log)
    engine = InferenceEngine(unsized(fake_setup(replicas=2)), real_system())
    try:
        await engine.start()
    finally:
        await engine.stop()
    said = sorted((call.method_name, *call.args, call.kwargs["replica"]) for call in log.calls)
    assert said == [("info", "measured in epoch 1", 0), ("info", "measured in epoch 1", 1)]


async def test_a_later_worker_gets_the_number() -> None:
    engine = InferenceEngine(unsized(fake_setup(replicas=2)), real_system())
    try:
        await engine.start()
        [handle] = await engine.submit([request(40)])
        reader = Reader(handle)
        for pid in engine.worker_pids:
            os.kill(pid, signal.SIGKILL)
        await reader.done()
    finally:
        await engine.stop()
    later = [setup for setup in ProfilingWorker.setups if setup.epoch > 1]
    assert {(setup.num_blocks, setup.max_model_len) for setup in later} == {(30, 464)}


async def test_a_context_that_fits_is_not_cut() -> None:
    engine = InferenceEngine(unsized(fake_setup(), asked=300), real_system())
    try:
        with capture_logs() as logs:
            await engine.start()
        assert (engine.setup.core.num_blocks, engine.max_model_len) == (40, 300)
        assert [line for line in logs if "cut" in line["event"]] == []
    finally:
        await engine.stop()


async def test_a_context_that_was_asked_for_and_does_not_fit_ends_the_start() -> None:
    engine = InferenceEngine(unsized(fake_setup(), asked=700), real_system())
    try:
        with pytest.raises(UsageError, match=r"--max-model-len 700 does not fit: .* 40 KV blocks, .* of 624 tokens"):
            await engine.start()
        assert engine.state == "dead"
    finally:
        await engine.stop()
    assert running_children() == []
