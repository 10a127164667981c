"""All replicas of an engine start together, but for those that measure the memory of one GPU."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from eventlm.config import ParallelConfig
from eventlm.engine.replicas.controller import ReplicaController
from eventlm.engine.replicas.group import Replicas
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.setup import Device
from eventlm.system.system import real_system
from eventlm.worker.protocol import WorkerReady
from tests.engine.test_setup import GPUS, setup_with


class Starts:
    """In place of `ReplicaController.start`: which have begun, and for which of them it has been let go on."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.options: dict[int, dict[str, Any]] = {}
        self._gates: dict[int, asyncio.Future[int]] = {}

    async def start(self, replica: ReplicaController, **options: Any) -> WorkerReady:
        self.begun.append(replica.index)
        self.options[replica.index] = options
        gate = self._gates[replica.index] = asyncio.get_running_loop().create_future()
        return WorkerReady(epoch=1, pid=1, num_blocks=await gate, model_fingerprint="m", host={})

    async def end(self, index: int, num_blocks: int) -> None:
        self._gates[index].set_result(num_blocks)
        await let_run()

    async def fail(self, index: int) -> None:
        self._gates[index].set_exception(EngineUnavailableError("no"))
        await let_run()


async def let_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr(ReplicaController, "start", lambda self, **options: found.start(self, **options))
    return found


def replicas_with(*, devices: list[Device], num_blocks: int, ranks: int = 1) -> Replicas:
    setup = setup_with(devices=devices, num_blocks=num_blocks, replicas=3)
    parallel = ParallelConfig(tensor_parallel_size=ranks)
    setup = structs.replace(setup, config=structs.replace(setup.config, parallel=parallel))
    return Replicas(real_system(), [setup], mock.Mock(), mock.Mock())


def test_the_launcher_of_a_set_learns_of_those_before_it() -> None:
    setup = setup_with(devices=[], num_blocks=64, replicas=1)
    launchers = [mock.Mock(is_local=True), mock.Mock(is_local=True)]
    Replicas(real_system(), [structs.replace(setup, launcher=each) for each in launchers], mock.Mock(), mock.Mock())
    assert [each.share.call_args for each in launchers] == [mock.call([]), mock.call(launchers[:1])]


async def test_replicas_that_measure_one_gpu_start_one_after_the_other(starts: Starts) -> None:
    task = asyncio.create_task(replicas_with(devices=GPUS, num_blocks=0).start(must_measure=[False]))
    await let_run()
    assert starts.begun == [0, 1]
    await starts.end(1, 90)
    assert starts.begun == [0, 1]
    await starts.end(0, 80)
    assert starts.begun == [0, 1, 2]
    await starts.end(2, 70)
    ((setup, first),) = await task
    assert (setup.core.num_blocks, first.num_blocks) == (70, 80)


async def test_replicas_whose_ranks_share_a_gpu_start_one_after_the_other(starts: Starts) -> None:
    gpus = [Device(f"cuda:{number}") for number in range(5)]
    replicas = replicas_with(devices=gpus, num_blocks=0, ranks=2)
    # GPUs 0 and 1; 2 and 3; 4 and 0.
    task = asyncio.create_task(replicas.start(must_measure=[False]))
    await let_run()
    assert sorted(starts.begun) == [0, 1]
    await starts.end(0, 80)
    assert sorted(starts.begun) == [0, 1, 2]
    for index in (1, 2):
        await starts.end(index, 80)
    await task


async def test_after_one_that_cannot_start_none_is_started(starts: Starts) -> None:
    task = asyncio.create_task(replicas_with(devices=GPUS[:1], num_blocks=0).start(must_measure=[False]))
    await let_run()
    await starts.fail(0)
    assert starts.begun == [0]
    with pytest.raises(EngineUnavailableError):
        await task


@pytest.mark.parametrize(("devices", "num_blocks"), [(GPUS[:1], 64), ([], 64)])
async def test_replicas_that_measure_nothing_start_at_once(
    starts: Starts, devices: list[Device], num_blocks: int
) -> None:
    task = asyncio.create_task(replicas_with(devices=devices, num_blocks=num_blocks).start(must_measure=[False]))
    await let_run()
    assert starts.begun == [0, 1, 2]
    for index in starts.begun:
        await starts.end(index, num_blocks)
    ((setup, _),) = await task
    assert setup.core.num_blocks == num_blocks


async def test_each_takes_the_process_that_was_spawned_for_it(starts: Starts) -> None:
    spawned: Any = [object(), object()]
    replicas = replicas_with(devices=[], num_blocks=64)
    task = asyncio.create_task(replicas.start(must_measure=[False], spawned=spawned))
    await let_run()
    assert [starts.options[index]["spawned"] for index in range(3)] == [spawned[:1], spawned[1:], []]
    for index in starts.begun:
        await starts.end(index, 64)
    await task
