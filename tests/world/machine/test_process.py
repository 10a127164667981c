"""Simulated processes, and how they end."""

from __future__ import annotations

import asyncio
import weakref

import pytest

import tests.world.machine.world
from tests.world.machine.process import Process
from tests.world.machine.world import SECOND, StuckError, World


def test_a_killed_process_never_runs_again() -> None:
    world = World(1)
    process, done = Process(world, "p"), []

    async def program() -> int:
        try:
            await asyncio.sleep(10)
            done.append("slept")
        finally:
            done.append("finally")
        return 0

    process.run(program())
    world.run_for(1)
    process.kill()
    world.run_for(60)
    assert (done, process.returncode, world.processes) == ([], -9, [])


def test_sleeps_take_their_time_and_at_most_a_millisecond_more() -> None:
    world = World(1)
    process, woken = Process(world, "p"), []

    async def program() -> int:
        for seconds in (3, 0.5, 86_400):
            began = process.loop.time()
            await asyncio.sleep(seconds)
            woken.append(process.loop.time() - began - seconds)
        return 3

    process.run(program())
    world.run(lambda: process.is_dead, most_seconds=100_000)
    assert process.returncode == 3
    assert all(0 <= late < 0.0021 for late in woken)


def test_a_frozen_process_does_nothing_meanwhile() -> None:
    world = World(1)
    process = Process(world, "p")

    async def program() -> int:
        await asyncio.sleep(1)
        return 0

    process.run(program())
    process.freeze(5_000_000_000)
    began_ns = world.now_ns
    world.run(lambda: process.is_dead, most_seconds=10)
    assert world.now_ns - began_ns >= 5_000_000_000


@pytest.mark.parametrize("stops_clock", [True, False])
def test_a_suspend_stops_loop_and_threads_and_perhaps_the_clock(stops_clock: bool) -> None:
    world = World(1)
    process, done = Process(world, "p"), []
    began_ns, began_here_ns = world.now_ns, process.monotonic_ns

    async def program() -> int:
        await asyncio.sleep(3)
        done.append(round(process.loop.time() - began_here_ns / SECOND))
        return 0

    process.run(program())
    process.after(2 * SECOND, lambda: done.append(round((process.monotonic_ns - began_here_ns) / SECOND)))
    world.run_for(1)
    process.suspend(60 * SECOND, stops_clock=stops_clock)
    world.run(lambda: process.is_dead, most_seconds=100)
    assert done == ([2, 3] if stops_clock else [61, 61])
    assert (world.now_ns - began_ns) // SECOND == (63 if stops_clock else 61)


def test_what_never_comes_is_said() -> None:
    with pytest.raises(StuckError, match="after 5"):
        World(1).run(lambda: False, most_seconds=5)


def test_what_a_killed_process_held_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests.world.machine.world, "_TURNS_OF_A_COLLECTION", 10)
    world = World(1)
    killed, going_on = Process(world, "killed"), Process(world, "going on")
    held = []

    async def hold() -> int:
        event = asyncio.Event()
        held.append(weakref.ref(event))
        await event.wait()
        return 0

    async def go_on() -> int:
        for _ in range(100):
            await asyncio.sleep(1)
        return 0

    killed.run(hold())
    going_on.run(go_on())
    world.run_for(1)
    killed.kill()
    world.run_for(1)
    assert held[0]() is not None
    world.run_for(20)
    assert (held[0](), world.graves) == (None, [])
