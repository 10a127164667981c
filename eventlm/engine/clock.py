"""The clock of a live run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventlm.system.clock import Clock


class AsyncioClock:
    """Monotonic time since the clock was made. Calls come from the running event loop, and `wake` follows each."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        self._clock = clock
        #: Where this clock stands at 0, on this host's monotonic one.
        self.origin_ns = clock.monotonic_ns()
        self._wake = wake

    def go_on(self, origin_ns: int) -> None:
        """Go on as the clock of an earlier engine of the run, which was at 0 at this time."""
        self.origin_ns = origin_ns

    def now_ns(self) -> int:
        """Nanoseconds since `origin_ns`."""
        return self._clock.monotonic_ns() - self.origin_ns

    def call_at(self, due_ns: int, action: Callable[[], None]) -> Callable[[], None]:
        """Call `action` at about that time. Returns what cancels it."""
        delay_seconds = max(due_ns - self.now_ns(), 0) / 1e9
        return asyncio.get_running_loop().call_later(delay_seconds, self._call, action).cancel

    def _call(self, action: Callable[[], None]) -> None:
        action()
        self._wake()
