from __future__ import annotations

import asyncio
import threading
import time

import pytest

from eventlm.system.threads import SystemThreads, run_blocking

SECONDS = 60


def test_actions_run_in_their_order_in_another_thread() -> None:
    thread = SystemThreads().start("tested")
    ran: list[tuple[int, str]] = []
    for number in range(100):
        thread.run(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]
    assert thread.wait(SECONDS)
    assert ran == [(number, "tested") for number in range(100)]
    thread.stop()


def test_a_wait_ends_when_its_time_is_over() -> None:
    thread = SystemThreads().start("tested")
    may_end = threading.Event()
    thread.run(lambda: assert_true(may_end.wait(SECONDS)))
    assert not thread.wait(0.01)
    may_end.set()
    assert thread.wait(SECONDS)
    thread.stop()


def test_a_program_runs_in_another_thread_and_blocks_it() -> None:
    threads = SystemThreads()
    may_end = threads.latch()
    ran: list[tuple[bool, str]] = []

    async def program() -> None:
        await threads.sleep(0.001)
        ran.append((await may_end.wait(SECONDS), threading.current_thread().name))

    ended = threads.run("tested", program)
    assert not run_blocking(ended.wait(0.01))
    may_end.set()
    assert run_blocking(ended.wait(SECONDS))
    assert ran == [(True, "tested")]


def test_a_program_that_blocks_gives_what_it_returns_and_raises() -> None:
    async def program(divisor: int) -> int:
        begun = time.monotonic()
        await SystemThreads().sleep(0.01)
        assert time.monotonic() - begun >= 0.01
        return 6 // divisor

    assert run_blocking(program(2)) == 3
    with pytest.raises(ZeroDivisionError):
        run_blocking(program(0))
    with pytest.raises(AssertionError, match="does not block"):
        run_blocking(asyncio.sleep(0))


def assert_true(value: bool) -> None:
    assert value


def test_a_stopped_thread_ends_after_its_actions() -> None:
    thread = SystemThreads().start("to be stopped")
    (found,) = [each for each in threading.enumerate() if each.name == "to be stopped"]
    ran: list[int] = []
    thread.run(lambda: ran.append(1))
    thread.stop()
    found.join(SECONDS)
    assert not found.is_alive()
    assert ran == [1]
