"""A replica's worker fails in every way it can: its sequences go on elsewhere, or everybody is told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from structlog.testing import CapturingLogger

from eventlm.config import ParallelConfig, WorkerConfig
from eventlm.engine.replicas import controller as replica_module
from eventlm.engine.replicas import rank_group
from eventlm.engine.replicas.controller import ReplicaController, StartPhases
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.setup import worker_setups
from eventlm.events import End, Fact, WorkerLost, WorkerUp
from eventlm.launchers.launcher import Launcher, LaunchError, StartedRank
from eventlm.launchers.process import ProcessLauncher
from eventlm.launchers.spawned_worker import kill_process, spawned_ahead
from eventlm.system.clock import SystemClock
from eventlm.system.system import System, real_system
from eventlm.worker.fake.tokens import FakeParameters, poisoned_place
from eventlm.worker.protocol import FromWorker, Heartbeat, StartProgress, StepResult, WorkerReady, WorkerSetup
from tests.engine.engines import (
    SLOW,
    Reader,
    expected_tokens,
    fake_setup,
    generate,
    recorded,
    request,
    running,
    verified,
)
from tests.engine.replicas.test_worker_process import PROGRESS
from tests.processes import PATIENCE_SECONDS, wait_until


async def lose_a_worker(folder: Path, number: int, reason: str, replicas: int) -> None:
    """By a signal; nobody misses a token."""
    # Long enough that the machine stops no other worker for so long.
    worker = WorkerConfig(heartbeat_timeout_seconds=4)
    async with running(record=folder, worker=worker, replicas=replicas, fake=SLOW) as engine:
        handles = await engine.submit([request(60, seed=seed) for seed in range(6)])
        readers = [Reader(handle) for handle in handles]
        await readers[0].until_tokens(5)
        os.kill(engine.worker_pids[0], number)
        for seed, reader in enumerate(readers):
            assert (await reader.done()).tokens == [expected_tokens(seed, 0, 60)]
    lost = [event for event in recorded(engine) if isinstance(event, WorkerLost)]
    assert [(event.replica, event.epoch, event.reason) for event in lost] == [(0, 1, reason)]
    verified(engine)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_killed_worker_costs_no_token(tmp_path: Path, replicas: int) -> None:
    await lose_a_worker(tmp_path, signal.SIGKILL, "died (killed by SIGKILL)", replicas)


async def test_a_silent_worker_costs_no_token(tmp_path: Path) -> None:
    """Each engine waits as long as a worker may be silent, so both wait at once."""
    async with asyncio.TaskGroup() as both:
        for replicas in (1, 2):
            both.create_task(lose_a_worker(tmp_path / str(replicas), signal.SIGSTOP, "no heartbeat for 4 s", replicas))


async def test_workers_that_die_in_every_few_steps(tmp_path: Path) -> None:
    async with running(record=tmp_path, replicas=2, fake={"die_ppm": 120_000}) as engine:
        readers = await generate(engine, *(request(40, seed=seed) for seed in range(8)))
        assert [reader.tokens[0] for reader in readers] == [expected_tokens(seed, 0, 40) for seed in range(8)]
    events = recorded(engine)
    assert sum(isinstance(event, WorkerUp) for event in events) > 2
    verified(engine)


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_request_that_kills_every_worker_ends_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    monkeypatch.setattr(replica_module, "RESTART_SECONDS", 0)
    fake = {"poison_ppm": 10_000}
    indices = [poisoned_place(FakeParameters(**fake), seed, 0) for seed in range(200)]
    assert [seed for seed, index in enumerate(indices) if index is not None] == [4, 94]
    async with running(record=tmp_path, replicas=replicas, fake=fake) as engine:
        readers = await generate(engine, *(request(20, seed=seed) for seed in range(200)))
        for seed, (reader, index) in enumerate(zip(readers, indices, strict=True)):
            assert reader.reasons == ["length" if index is None else "error"]
            assert reader.tokens == [expected_tokens(seed, 0, 20 if index is None else index)]
        assert engine.state == "ready"
    verified(engine)


async def test_restarts_for_requests_that_end_by_them_use_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "RESTART_SECONDS", 0)
    fake = {"poison_ppm": 1_000_000}
    async with running(record=tmp_path, fake=fake, worker=WorkerConfig(max_restarts=3)) as engine:
        for seed in range(3):
            [reader] = await generate(engine, request(20, seed=seed))
            assert reader.reasons == ["error"]
        assert engine.state == "ready"
    num_losses = sum(isinstance(event, WorkerLost) for event in recorded(engine))
    assert num_losses >= 9
    verified(engine)


async def test_a_hung_step_is_ended(tmp_path: Path) -> None:
    fake = {"late_ppm": 100_000, "late_factor": 2000}
    worker = WorkerConfig(step_timeout_seconds=1)
    async with running(record=tmp_path, worker=worker, fake=fake) as engine:
        [reader] = await generate(engine, request(10))
        assert reader.tokens == [expected_tokens(5, 0, 10)]
    assert "one step took longer than 1 s" in [
        event.reason for event in recorded(engine) if isinstance(event, WorkerLost)
    ]


async def test_a_blocked_loop_loses_no_step_and_no_worker(tmp_path: Path) -> None:
    worker = WorkerConfig(heartbeat_timeout_seconds=4)
    async with running(record=tmp_path, worker=worker, fake={"base_ns": 60_000_000}) as engine:
        [handle] = await engine.submit([request(12)])
        reader = Reader(handle)
        await reader.until_tokens(1)
        # The loop itself is away for longer than a worker may be silent.
        time.sleep(4.5)  # noqa: ASYNC251
        assert (await reader.done()).tokens == [expected_tokens(5, 0, 12)]
    assert not any(isinstance(event, WorkerLost) for event in recorded(engine))


@pytest.mark.parametrize("timeout_seconds", [1, 2, 20, 600])
def test_a_worker_is_lost_by_several_beats_that_do_not_come(timeout_seconds: int) -> None:
    setup = fake_setup(worker=WorkerConfig(heartbeat_timeout_seconds=timeout_seconds))
    [worker] = worker_setups(setup)
    assert 4 * worker.heartbeat_ns <= timeout_seconds * 1_000_000_000


async def test_an_idle_worker_beats_and_is_not_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    num_beats = 0
    note_beat = ReplicaController._note_beat

    def count(self: ReplicaController, *, is_idle: bool) -> None:
        nonlocal num_beats
        num_beats += is_idle
        note_beat(self, is_idle=is_idle)

    monkeypatch.setattr(ReplicaController, "_note_beat", count)
    async with running(record=tmp_path, worker=WorkerConfig(heartbeat_timeout_seconds=4)) as engine:
        # As many as come in the time of a worker that says nothing.
        await asyncio.to_thread(wait_until, lambda: num_beats > 4)
    assert not any(isinstance(event, WorkerLost) for event in recorded(engine))


async def test_without_workers_every_request_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(record=tmp_path, worker=WorkerConfig(max_restarts=1), fake=SLOW) as engine:
        readers = [Reader(handle) for handle in await engine.submit([request(300), request(300, n=2)])]
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        for reader in readers:
            with pytest.raises(EngineUnavailableError, match=r"no worker is left: died \(killed by SIGKILL\)"):
                await reader.done()
        assert engine.state == "dead"
        assert engine.worker_pids == [0]
        with pytest.raises(EngineUnavailableError, match="died: no worker is left: died"):
            await engine.submit([request()])
    assert isinstance(recorded(engine)[-1], End)
    verified(engine)


async def test_one_replica_given_up_leaves_its_work_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(record=tmp_path, replicas=2, worker=WorkerConfig(max_restarts=0), fake=SLOW) as engine:
        readers = [Reader(handle) for handle in await engine.submit([request(40, seed=seed) for seed in range(6)])]
        await readers[0].until_tokens(3)
        os.kill(engine.worker_pids[1], signal.SIGKILL)
        for seed, reader in enumerate(readers):
            assert (await reader.done()).tokens == [expected_tokens(seed, 0, 40)]
        assert engine.state == "ready"
    verified(engine)


async def test_a_defect_in_the_supervision_is_a_replica_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(record=tmp_path, fake=SLOW) as engine:
        [handle] = await engine.submit([request(300)])
        reader = Reader(handle)
        await reader.until_tokens(2)

        async def fail(self: WorkerProcess, timeout_seconds: float) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(WorkerProcess, "receive", fail)
        with pytest.raises(EngineUnavailableError, match="broken"):
            await reader.done()
    verified(engine)


async def test_restarts_in_a_row_are_counted_and_take_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    async with running(worker=WorkerConfig(max_restarts=1200), fake=SLOW) as engine:
        [handle] = await engine.submit([request(300)])
        monkeypatch.setattr(replica_module.asyncio, "sleep", note)
        monkeypatch.setattr(sys, "executable", "/no/such/python")
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="no worker is left"):
            await Reader(handle).done()
    assert len(waits) == 1200
    assert waits[:3] == [0.1, 0.2, 0.4]
    assert max(waits) == waits[-1] < 30


class ScriptedWorker:
    """In a worker's place: gets ready, is idle for some heartbeats, then dies."""

    pid, host, ending, crashed, is_end_of_all = 1, "", "died (killed by SIGKILL)", False, False
    #: Of the workers that are still to come.
    num_beats: ClassVar[list[int]] = []
    busy_ns: ClassVar[int] = 0

    def __init__(self, system: System, setup: WorkerSetup) -> None:
        self._words: list[FromWorker] = []
        if self.num_beats:
            beat = Heartbeat(epoch=setup.epoch, busy_ns=self.busy_ns)
            self._words = [WorkerReady(epoch=setup.epoch, pid=1), *[beat] * self.num_beats.pop(0)]

    async def start(self, spawned: StartedRank | None) -> None:
        pass

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        return self._words.pop(0) if self._words else None

    async def answer(self, timeout_seconds: float, on_progress: object) -> FromWorker | None:
        return await self.receive(timeout_seconds)

    async def learn_time(self, patience: object) -> bool:
        return True

    async def kill(self) -> None:
        pass


class NoLauncher(Launcher, frozen=True):
    """Starts nothing: for scripted workers."""

    async def start(self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()) -> Any:
        return SimpleNamespace(ranks=[SimpleNamespace(host="")] * len(setups), setups=setups, release=lambda: None)


class NoEngine:
    """In the engine's place."""

    grammars = GrammarBuilds(lambda replica, message: None, lambda request, error: None, lambda seconds, action: None)

    def put_fact(self, fact: Fact) -> None:
        pass

    def complete(self, replica: int, result: StepResult) -> None:
        raise AssertionError

    def room_changed(self) -> None:
        pass

    def left_changed(self) -> None:
        pass


class FullLauncher(Launcher, frozen=True, kw_only=True):
    """Has no room for a second worker `times` times; then it fails."""

    times: int = 0
    starts: list[int] = []
    given_up: list[int] = []

    async def start(self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()) -> Any:
        self.starts.append(setups[0].epoch)
        if 1 < len(self.starts) <= 1 + self.times:
            raise LaunchError("no room", waits_for_room=True)
        if len(self.starts) > 1 + self.times:
            raise LaunchError("no such host")
        return SimpleNamespace(ranks=[SimpleNamespace(host="")] * len(setups), setups=setups, release=lambda: None)

    def give_up(self, replica: int) -> None:
        self.given_up.append(replica)
        raise RuntimeError("a launcher's defect")


async def test_one_that_waits_for_room_uses_up_no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    log, waiting = CapturingLogger(), []

    async def no_wait(seconds: float) -> None:
        assert seconds <= 0.4

    monkeypatch.setattr(rank_group, "WorkerProcess", ScriptedWorker)
    monkeypatch.setattr(ScriptedWorker, "num_beats", [1])
    monkeypatch.setattr(ScriptedWorker, "busy_ns", 0)
    monkeypatch.setattr(replica_module.asyncio, "sleep", no_wait)
    monkeypatch.setattr(replica_module, "log", log)
    [setup] = worker_setups(fake_setup())
    given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine, launcher = NoEngine(), FullLauncher(times=50)
    config = WorkerConfig(max_restarts=3)
    replica = ReplicaController(real_system(), [setup], config, engine, given_up.set_result, launcher)
    monkeypatch.setattr(engine, "room_changed", lambda: waiting.append(replica.waits_for_room))
    await replica.start(warm_up=False)
    replica.run(fake_setup().core)
    await asyncio.wait_for(given_up, PATIENCE_SECONDS)
    await replica.stop()
    assert len(launcher.starts) == 1 + 50 + 3
    assert launcher.given_up == [0]
    assert waiting == [True, False]
    # However often it is tried, it is logged once.
    errors = [call.kwargs["error"] for call in log.calls if call.args == ("worker did not start",)]
    assert errors == ["no room"] + ["no such host"] * 3


async def waits_of(monkeypatch: pytest.MonkeyPatch, num_beats: list[int], *, busy_ns: int = 0) -> list[float]:
    """The waits before the restarts of a replica whose workers live so many heartbeats, until it is given up."""
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(rank_group, "WorkerProcess", ScriptedWorker)
    monkeypatch.setattr(ScriptedWorker, "num_beats", list(num_beats))
    monkeypatch.setattr(ScriptedWorker, "busy_ns", busy_ns)
    monkeypatch.setattr(replica_module.asyncio, "sleep", note)
    engine_setup = fake_setup()
    [setup] = worker_setups(engine_setup)
    assert setup.heartbeat_ns == 1_000_000_000
    given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    replica = ReplicaController(
        real_system(), [setup], WorkerConfig(max_restarts=3), NoEngine(), given_up.set_result, NoLauncher()
    )
    await replica.start(warm_up=False)
    replica.run(engine_setup.core)
    assert await asyncio.wait_for(given_up, PATIENCE_SECONDS) == "died (killed by SIGKILL)"
    await replica.stop()
    return waits


async def test_idle_workers_that_die_now_and_then_are_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Twenty that were sound for a minute; behind them nobody starts any more.
    assert await waits_of(monkeypatch, [60] * 20) == [0.1] * 20 + [0.2, 0.4]


async def test_workers_that_die_sooner_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await waits_of(monkeypatch, [59] * 20) == [0.1, 0.2, 0.4]


async def test_a_minute_in_a_hung_step_is_no_sign_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await waits_of(monkeypatch, [300] * 20, busy_ns=1) == [0.1, 0.2, 0.4]


def test_each_phase_is_a_line_with_its_time_and_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(replica_module, "log", log)
    told: list[StartProgress] = []
    whose = {"replica": 0, "epoch": 1}
    phases = StartPhases(SystemClock(), whose, told.append)
    for progress in PROGRESS:
        phases.note(progress)
    assert phases.phase == "compiling kernels"
    phases.end()
    assert phases.phase == ""
    assert told == PROGRESS
    assert [(call.method_name, call.args) for call in log.calls] == [("info", ("worker starts",))] * 2
    first, second = (call.kwargs for call in log.calls)
    assert all(line.pop("seconds") >= 0 for line in (first, second))
    assert first == whose | {"phase": "reading weights", "next": "compiling kernels"}
    assert second == whose | {"phase": "compiling kernels"}


async def test_one_that_dies_before_its_setup_was_loading_libraries() -> None:
    [setup] = worker_setups(fake_setup())
    replica = ReplicaController(real_system(), [setup], WorkerConfig(), NoEngine(), print, ProcessLauncher())
    async with spawned_ahead(real_system(), 1) as spawned:
        kill_process(spawned[0].process)
        with pytest.raises(EngineUnavailableError, match=r"SIGKILL\) while it started \(loading libraries\)"):
            await replica.start(warm_up=False, spawned=spawned)


async def test_a_rank_that_dies_at_its_start_is_named() -> None:
    setups = worker_setups(fake_setup(parallel=ParallelConfig(tensor_parallel_size=2)))
    replica = ReplicaController(real_system(), setups, WorkerConfig(), NoEngine(), print, ProcessLauncher())
    async with spawned_ahead(real_system(), 2) as spawned:
        kill_process(spawned[1].process)
        with pytest.raises(EngineUnavailableError, match=r"^rank 1 of worker 0 died"):
            await replica.start(warm_up=False, spawned=spawned)


def test_a_start_without_phases_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(replica_module, "log", log)
    StartPhases(SystemClock(), {}).end()
    assert log.calls == []
