from __future__ import annotations

import threading

from eventlm.system.threads import SystemThreads

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
