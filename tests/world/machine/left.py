"""What a process has under way: tasks, timers, open files and threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.world.machine.process import Process

#: Tasks that the world itself has in the server's process.
_WORLDS = "Watch."


def tasks_of(process: Process) -> Counter[str]:
    """The tasks that have not ended, by the names of their coroutines."""
    names = (_name_of(task.get_coro()) for task in asyncio.all_tasks(process.loop))
    return Counter(name for name in names if not name.startswith(_WORLDS))


def timers_of(process: Process) -> Counter[str]:
    """The timers that have not been cancelled, by the names of what they call."""
    scheduled: list[Any] = process.loop._scheduled  # type: ignore[attr-defined]
    return Counter(_name_of(timer._callback) for timer in scheduled if not timer._cancelled)


def _name_of(callback: Any) -> str:
    return str(getattr(getattr(callback, "func", callback), "__qualname__", callback))


def left_in(process: Process) -> list[str]:
    """What it would leave if it ended now, in words. That timers are left is no harm then."""
    files = process.world.disk.open_files(process.name)
    return [*sorted(tasks_of(process)), *map(str, files), *(f"thread {name}" for name in process.threads)]
