"""Workers that are spawned before an engine knows what they are to do."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.launchers.launcher import StartedRank
from eventlm.launchers.spawned_worker import kill_process, spawn_worker, spawned_ahead
from eventlm.system.system import real_system
from eventlm.worker.protocol import WorkerReady
from tests.engine.replicas.test_worker_process import SETUP, contents, next_word
from tests.processes import is_running, wait_until


async def test_one_gets_its_setup_later_and_the_others_end() -> None:
    async with spawned_ahead(real_system(), 3) as spawned:
        pids = [each.process.pid for each in spawned]
        assert len({*pids, os.getpid()}) == 4
        worker = WorkerProcess(real_system(), SETUP)
        await worker.start(spawned[1])
        ready = await next_word(worker)
        assert isinstance(ready, WorkerReady)
        assert ready.pid == worker.pid == pids[1]
        await worker.stop()
        assert [is_running(pid) for pid in pids] == [True, False, True]
    assert not any(map(is_running, pids))


async def test_those_that_wait_end_with_a_command_that_fails() -> None:
    with pytest.raises(LookupError):
        async with spawned_ahead(real_system(), 2) as spawned:
            raise LookupError
    assert [is_running(each.process.pid) for each in spawned] == [False, False]


async def test_a_second_cancellation_leaves_none_running(nothing_left_behind: Path) -> None:
    # Kept here, because asyncio kills a process of which nobody has a handle.
    workers: list[StartedRank] = []
    are_up = asyncio.Event()

    async def serve() -> None:
        # It prints something, by which time they have opened their pipes: without those they could not start.
        async with spawned_ahead(real_system(), 3, "this") as spawned:
            workers.extend(spawned)
            for worker in workers:
                assert worker.process.stdout is not None
                await worker.process.stdout.readline()
            are_up.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await are_up.wait()
    serving.cancel()
    # It waits for the first of them to end.
    for _ in range(3):
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await asyncio.to_thread(wait_until, lambda: not any(is_running(each.process.pid) for each in workers))
    assert contents(nothing_left_behind) == []


async def test_libraries_are_loaded_before_there_is_a_setup() -> None:
    # It prints something.
    worker = await spawn_worker(real_system(), "this")
    assert worker.process.stdout is not None
    assert await worker.process.stdout.readline() == b"The Zen of Python, by Tim Peters\n"
    kill_process(worker.process)
    await worker.process.wait()
    worker.pipe.close()


async def test_a_library_that_is_missing_is_said_and_keeps_no_worker_from_starting() -> None:
    async with spawned_ahead(real_system(), 1, "no_such_library") as spawned:
        output = spawned[0].process.stdout
        assert output is not None
        line = await output.readline()
        assert line == b"cannot import no_such_library: ModuleNotFoundError: No module named 'no_such_library'\n"
        worker = WorkerProcess(real_system(), SETUP)
        await worker.start(spawned[0])
        assert isinstance(await next_word(worker), WorkerReady)
        await worker.kill()


async def test_what_cannot_be_spawned_is_left_to_the_start(
    monkeypatch: pytest.MonkeyPatch, nothing_left_behind: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    async with spawned_ahead(real_system(), 2) as spawned:
        assert list(spawned) == []
        assert contents(nothing_left_behind) == []
