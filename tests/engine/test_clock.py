"""The clock of a live run: it goes on, calls at about the time asked for, and wakes the engine then."""

from __future__ import annotations

import asyncio

from eventlm.engine.clock import AsyncioClock
from eventlm.system.clock import SystemClock


async def test_calls_come_when_they_are_due_and_wake_follows_each() -> None:
    order: list[str] = []
    done = asyncio.Event()

    def wake() -> None:
        order.append("wake")
        if order.count("wake") == 2:
            done.set()

    clock = AsyncioClock(SystemClock(), wake)
    began_ns = clock.now_ns()
    clock.call_at(began_ns + 20_000_000, lambda: order.append("later"))
    cancel = clock.call_at(began_ns + 1_000_000, lambda: order.append("never"))
    clock.call_at(0, lambda: order.append("overdue"))
    cancel()
    await asyncio.wait_for(done.wait(), 30)
    assert order == ["overdue", "wake", "later", "wake"]
    assert clock.now_ns() > began_ns
