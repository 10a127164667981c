"""The clock's part in the core's timers: a fact when the earliest of them is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventlm.core.core import Core
from eventlm.events import TimerDue


class CoreTimer:
    """One timer of the running loop, on the time of `now_ns`. `put_fact` queues what is due for the next tick."""

    def __init__(self, now_ns: Callable[[], int], put_fact: Callable[[TimerDue], None]) -> None:
        self._now_ns = now_ns
        self._put_fact = put_fact
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, core: Core) -> None:
        """Wake when the core's earliest timer is due, and then no more until it is armed again."""
        due_ns = core.next_timer_ns
        self.cancel()
        if due_ns is not None:
            delay = max(due_ns - self._now_ns(), 0) / 1e9
            self._handle = asyncio.get_running_loop().call_later(delay, self._fire, core)

    def cancel(self) -> None:
        """Wake no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, core: Core) -> None:
        due_ns, now_ns = core.next_timer_ns, self._now_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._put_fact(TimerDue(due_ns=now_ns))
        else:
            self.arm(core)
