"""Threads.

What blocks them is awaited, so that a simulation can run many programs in one thread: it suspends them where they wait.
On a host each wait blocks its thread and returns, so a program that awaits nothing else is never suspended.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class TaskThread(Protocol):
    """A thread that runs one action after another. It does not keep the process alive."""

    def run(self, action: Callable[[], None]) -> None:
        """Queue an action, which must not raise."""
        ...

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the actions queued so far have returned; False if that takes longer. None: wait as long as it
        takes.
        """
        ...

    def stop(self) -> None:
        """End the thread after the actions queued so far. Returns at once; the last call."""
        ...


class Latch(Protocol):
    """What threads wait for: it is set once, by any of them."""

    def set(self) -> None: ...

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait until it is set, at most so long; whether it is."""
        ...


class Threads(Protocol):
    """Starts threads, and lets them wait."""

    def start(self, name: str) -> TaskThread:
        """A new thread."""
        ...

    def run(self, name: str, program: Callable[[], Coroutine[Any, Any, None]]) -> Latch:
        """Run a program in a new thread, which does not keep the process alive; set when it has ended."""
        ...

    def latch(self) -> Latch:
        """A new one, which is not set."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let this thread do nothing for so long."""
        ...


class SystemThreads:
    """Threads of the host."""

    def start(self, name: str) -> TaskThread:
        """As Threads.start."""
        return _TaskThread(name)

    def run(self, name: str, program: Callable[[], Coroutine[Any, Any, None]]) -> Latch:
        """As Threads.run."""
        ended = self.latch()

        def act() -> None:
            try:
                run_blocking(program())
            finally:
                ended.set()

        threading.Thread(target=act, name=name, daemon=True).start()
        return ended

    def latch(self) -> Latch:
        """As Threads.latch."""
        return _Latch()

    async def sleep(self, seconds: float) -> None:
        """As Threads.sleep."""
        time.sleep(seconds)  # noqa: ASYNC251


def run_blocking(program: Coroutine[Any, Any, T]) -> T:
    """Run a program in this thread, which each of its waits blocks; what it returns."""
    try:
        program.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for what does not block")


class _Latch:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_seconds: float) -> bool:
        return self._event.wait(timeout_seconds)


class _TaskThread:
    def __init__(self, name: str) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run_actions, name=name, daemon=True).start()

    def run(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    def wait(self, timeout_seconds: float | None) -> bool:
        is_done = threading.Event()
        self._actions.put(is_done.set)
        return is_done.wait(timeout_seconds)

    def stop(self) -> None:
        self._actions.put(None)

    def _run_actions(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
