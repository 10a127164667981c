"""A disk whose writes hang for as long as a test likes, and a loop that a test turns by hand."""

from __future__ import annotations

import errno
import heapq
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

SECONDS = 60


class SlowDisk:
    """While it hangs, whoever writes or syncs waits. hangs: somebody does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.hangs = threading.Event()
        #: How many of the next writes find no room.
        self.num_full = 0
        self.num_writes = 0
        self.num_syncs = 0
        #: How many of the next syncs fail.
        self.num_failing = 0
        #: Only syncs hang.
        self.takes_writes = False
        self._answers = threading.Event()
        self._answers.set()
        self._write, self._sync = os.write, os.fdatasync
        patch.setattr(os, "write", self.write)
        patch.setattr(os, "fdatasync", self.sync)

    def hang(self, *, takes_writes: bool = False) -> None:
        """From the next write or sync on."""
        self.takes_writes = takes_writes
        self.hangs.clear()
        self._answers.clear()

    def answer(self) -> None:
        """To all that hang, and to those that come."""
        self._answers.set()

    def write(self, fd: int, data: bytes) -> int:
        """write(2)."""
        self.num_writes += 1
        if not self.takes_writes:
            self._wait()
        if self.num_full:
            self.num_full -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data)

    def sync(self, fd: int) -> None:
        """fdatasync(2)."""
        self.num_syncs += 1
        self._wait()
        if self.num_failing:
            self.num_failing -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)

    def _wait(self) -> None:
        if not self._answers.is_set():
            self.hangs.set()
            assert self._answers.wait(SECONDS), "the test never let it answer"


class Timer:
    """A call at a time."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def cancel(self) -> None:
        """Make it nothing."""
        self.call = lambda: None


class HandLoop:
    """What a recorder needs of a loop. Nothing is called, and no time goes by, but by the test's hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_timers = 0
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        """Seconds."""
        return self.now

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
        """Called by `turn`."""
        self._calls.put(lambda: call(*arguments))

    def call_at(self, when: float, call: Callable[..., None], *arguments: Any) -> Timer:
        """Called by `sleep`."""
        timer = Timer(lambda: call(*arguments))
        self.num_timers += 1
        heapq.heappush(self._timers, (when, self.num_timers, timer))
        return timer

    def turn(self) -> None:
        """Wait for one call of another thread, and do it."""
        self._calls.get(timeout=SECONDS)()

    def sleep(self, seconds: float) -> None:
        """Let time go by, with the timers that are due."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2].call()
