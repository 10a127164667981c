"""Threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol


class TaskThread(Protocol):
    """A thread that runs one action after another. It does not keep the process alive."""

    def run(self, action: Callable[[], None]) -> None:
        """Queue an action, which must not raise."""
        ...

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the actions queued so far have returned; False if that takes longer."""
        ...

    def stop(self) -> None:
        """End the thread after the actions queued so far. Returns at once; the last call."""
        ...


class Threads(Protocol):
    """Starts threads."""

    def start(self, name: str) -> TaskThread:
        """A new thread."""
        ...


class SystemThreads:
    """Threads of the host."""

    def start(self, name: str) -> TaskThread:
        """As Threads.start."""
        return _TaskThread(name)


class _TaskThread:
    def __init__(self, name: str) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run_actions, name=name, daemon=True).start()

    def run(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    def wait(self, timeout_seconds: float) -> bool:
        is_done = threading.Event()
        self._actions.put(is_done.set)
        return is_done.wait(timeout_seconds)

    def stop(self) -> None:
        self._actions.put(None)

    def _run_actions(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
