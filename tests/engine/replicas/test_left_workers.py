"""Which workers of an engine that is gone the next one takes over."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.engine.replicas import left_workers
from eventlm.engine.replicas.left_workers import LeftWorkers, describe
from eventlm.launchers.spawned_worker import kill_and_close
from eventlm.system.left_process import LeftProcess
from eventlm.system.system import real_system
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup
from tests.processes import is_running, until
from tests.worker.test_loop import SETUP

Leave = Callable[[bytes], LeftProcess]


@pytest.fixture
async def leave(tmp_path: Path) -> AsyncIterator[Leave]:
    """A process that says so of itself."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    folder = tmp_path / "pipe"
    folder.mkdir()
    yield lambda about: LeftProcess(process.pid, (f"ipc://{folder}/in", f"ipc://{folder}/out"), about)
    await until(lambda: not is_running(process.pid))
    await process.wait()
    assert not any(folder.parent.glob("pipe/*"))


async def test_one_that_would_be_started_in_the_same_way_is_taken(leave: Leave) -> None:
    left = LeftWorkers(real_system(), [leave(describe(SETUP, FAKE_MODEL))])
    rank = await left.take(structs.replace(SETUP, epoch=9, warm_up=False))
    assert rank is not None
    assert (rank.epoch, rank.fingerprint) == (SETUP.epoch, FAKE_MODEL)
    await left.end()
    assert rank.process.returncode is None
    await kill_and_close([rank])


@pytest.mark.parametrize(
    ("setup", "fingerprint"), [(structs.replace(SETUP, max_num_seqs=1), FAKE_MODEL), (SETUP, "of other weights")]
)
async def test_another_one_is_ended(leave: Leave, setup: WorkerSetup, fingerprint: str) -> None:
    left = LeftWorkers(real_system(), [leave(describe(SETUP, fingerprint))])
    assert await left.take(setup) is None


async def test_one_of_other_code_is_ended(leave: Leave, monkeypatch: pytest.MonkeyPatch) -> None:
    left = LeftWorkers(real_system(), [leave(describe(SETUP, FAKE_MODEL))])
    monkeypatch.setattr(left_workers, "_code", lambda: "other")
    assert await left.take(SETUP) is None


async def test_one_that_nobody_takes_is_ended(leave: Leave) -> None:
    left = LeftWorkers(real_system(), [leave(describe(SETUP, FAKE_MODEL))])
    assert await left.take(structs.replace(SETUP, replica=1)) is None
    await left.end()


async def test_one_of_which_too_little_is_known_is_ended(leave: Leave) -> None:
    left = LeftWorkers(real_system(), [leave(b"no description")])
    assert await left.take(SETUP) is None


async def test_one_that_has_died_is_none() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    left = LeftWorkers(real_system(), [LeftProcess(process.pid, ("", ""), describe(SETUP, FAKE_MODEL))])
    assert await left.take(SETUP) is None
