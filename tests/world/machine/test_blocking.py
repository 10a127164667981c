"""Programs that block are suspended where they wait, like threads of a real host."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from eventlm.system.processes import PARENT_POLL_S
from eventlm.system.system import System
from tests.world.machine.blocking import run_program
from tests.world.machine.host import system_of
from tests.world.machine.process import SIGKILL, Process
from tests.world.machine.world import SECOND, World

Program = Callable[[System], Coroutine[Any, Any, Any]]


def run(program: Program, *, seconds: float = 100) -> Process:
    """Run a program for some seconds in a new process. The result of the program is the exit status."""
    world = World(1)
    process = Process(world, "child", Process(world, "parent"))
    system = system_of(process, {})
    run_program(process, lambda: program(system), process.end)
    world.run_for(seconds)
    return process


@pytest.mark.parametrize(("seconds", "left"), [(1, ["other"]), (3, [])])
def test_a_thread_runs_until_its_program_ends(seconds: float, left: list[str]) -> None:
    async def program(system: System) -> None:
        system.threads.run("other", lambda: system.threads.sleep(2))
        await system.threads.sleep(100)

    assert run(program, seconds=seconds).threads == left


def test_a_sleep_takes_its_time_and_others_run_meanwhile() -> None:
    slept: list[tuple[str, float]] = []

    async def program(system: System) -> int:
        begun_ns = system.clock.monotonic_ns()

        async def sleep(name: str, seconds: float) -> None:
            await system.threads.sleep(seconds)
            slept.append((name, (system.clock.monotonic_ns() - begun_ns) // SECOND))

        ended = system.threads.run("other", lambda: sleep("other", 2))
        await sleep("main", 1)
        assert not await ended.wait(0.5)
        await sleep("main", 0.25)
        assert await ended.wait(5)
        return 3

    assert run(program).returncode == 3
    assert slept == [("main", 1), ("main", 1), ("other", 2)]


def test_a_latch_is_waited_for_in_vain_as_long_as_nobody_sets_it() -> None:
    heard = []

    async def program(system: System) -> int:
        latch = system.threads.latch()

        async def listen() -> None:
            heard.append(await latch.wait(1))
            heard.append(await latch.wait(10))
            heard.append(await latch.wait(0))

        ended = system.threads.run("other", listen)
        await system.threads.sleep(3)
        latch.set()
        assert await ended.wait(1)
        return 0

    assert run(program).returncode == 0
    assert heard == [False, True, True]


def test_a_process_that_is_killed_runs_none_of_its_programs_again() -> None:
    ran = []

    async def program(system: System) -> int:
        async def sleep(seconds: float) -> None:
            await system.threads.sleep(seconds)
            ran.append(seconds)

        system.threads.run("other", lambda: sleep(20))
        await sleep(10)
        return 0

    process = run(program, seconds=5)
    process.end(-SIGKILL)
    process.world.run_for(60)
    assert (ran, process.errors) == ([], [])


def test_an_error_ends_the_process_and_is_kept() -> None:
    async def program(system: System) -> int:
        async def fail() -> None:
            await system.threads.sleep(1)
            raise ValueError("no")

        system.threads.run("other", fail)
        await system.threads.sleep(60)
        return 0

    process = run(program)
    assert process.returncode == 1
    assert process.errors == ["child has failed: ValueError('no')"]


@pytest.mark.parametrize("dies_first", [True, False])
def test_an_orphan_learns_it_in_time_and_leaves(dies_first: bool) -> None:
    async def program(system: System) -> None:
        if dies_first:
            await system.threads.sleep(8)
        await system.processes.orphaned(system.processes.parent_pid)
        system.processes.exit(7)

    process = run(program, seconds=5)
    assert process.parent is not None
    process.parent.end(0)
    process.world.run_for(3 + PARENT_POLL_S + 0.1 if dies_first else PARENT_POLL_S + 0.1)
    assert process.returncode == 7
