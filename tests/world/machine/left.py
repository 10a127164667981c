"""What a process still has in use: tasks, timers, open files and threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.world.machine.process import Process

#: Prefix of the tasks that the world itself runs in the server's process.
_WORLDS = "Watch."


def tasks_of(process: Process) -> Counter[str]:
    """The unfinished tasks, counted by the name of their coroutine."""
    names = (_name_of(task.get_coro()) for task in asyncio.all_tasks(process.loop))
    return Counter(name for name in names if not name.startswith(_WORLDS))


def timers_of(process: Process) -> Counter[str]:
    """The timers that are not cancelled, counted by the name of their callback."""
    scheduled: list[Any] = process.loop._scheduled  # type: ignore[attr-defined]
    return Counter(_name_of(timer._callback) for timer in scheduled if not timer._cancelled)


def _name_of(callback: Any) -> str:
    return str(getattr(getattr(callback, "func", callback), "__qualname__", callback))


def left_in(process: Process) -> list[str]:
    """What the process would leak if it ended now, in words. Pending timers do not count: they do no harm then."""
    files = process.world.disk.open_files(process.name)
    return [*sorted(tasks_of(process)), *map(str, files), *(f"thread {name}" for name in process.threads)]
