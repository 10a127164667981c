"""Ranks as child processes: they share a folder, and nothing is left of a start that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.launchers.launcher import StartedRank
from eventlm.launchers.process import ProcessLauncher
from eventlm.launchers.spawned_worker import kill_and_close, spawn_worker, spawned_ahead
from eventlm.system.shared_folder import StepBoard
from eventlm.system.system import System, real_system
from tests.engine.replicas.test_worker_process import SETUP
from tests.processes import is_running

SETUPS = [structs.replace(SETUP, rank=rank) for rank in range(3)]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the file system in memory."""
    monkeypatch.setattr("eventlm.system.shared_folder._MEMORY", tmp_path)
    return tmp_path


async def test_ranks_share_a_folder_and_a_board(memory: Path) -> None:
    started = await ProcessLauncher().start(real_system(), SETUPS)
    try:
        assert len({rank.process.pid for rank in started.ranks}) == 3
        [folder] = {setup.peers.shared_memory for setup in started.setups}
        assert os.listdir(memory) == [Path(folder).name]
        assert [setup.rank for setup in started.setups] == [0, 1, 2]
        StepBoard(folder).write(1, 12)
        assert [started.step_in_hand(rank) for rank in range(3)] == [-1, 12, -1]
    finally:
        await kill_and_close(started.ranks)
    started.release()
    started.release()
    assert os.listdir(memory) == []
    # It is read when the group has ended.
    assert started.step_in_hand(1) == 12


async def test_one_process_shares_nothing(memory: Path) -> None:
    started = await ProcessLauncher().start(real_system(), SETUPS[:1])
    await kill_and_close(started.ranks)
    assert started.setups == SETUPS[:1]
    assert started.step_in_hand(0) == -1
    assert os.listdir(memory) == []


async def test_those_that_were_spawned_before_come_first() -> None:
    async with spawned_ahead(real_system(), 2) as spawned:
        started = await ProcessLauncher().start(real_system(), SETUPS, spawned)
        assert list(started.ranks[:2]) == list(spawned)
        await kill_and_close(started.ranks)
    started.release()


async def test_of_a_start_that_fails_nothing_is_left(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[StartedRank] = []

    async def spawn(system: System) -> StartedRank:
        if begun:
            monkeypatch.setattr(sys, "executable", "/no/such/python")
        begun.append(await spawn_worker(system))
        return begun[-1]

    monkeypatch.setattr("eventlm.launchers.spawned_worker.spawn_worker", spawn)
    with pytest.raises(OSError, match="No such file"):
        await ProcessLauncher().start(real_system(), SETUPS)
    assert [is_running(rank.process.pid) for rank in begun] == [False]
    assert os.listdir(memory) == []
