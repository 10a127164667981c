"""Waiting for what other processes and threads do, and looking at the processes that there are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

#: For everything that a busy machine may delay.
PATIENCE_SECONDS = 120.0


def wait_until(condition: Callable[[], Any], *, seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll until the condition is truthy; returns what it returned. A long wait is polled less often."""
    begun = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - begun
        assert waited < seconds, "it did not happen in time"
        time.sleep(min(max(0.005, waited / 20), 0.025))
    return found


async def until(condition: Callable[[], Any], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait in a running loop until the condition is truthy."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def children(pid: int) -> list[int]:
    """Process ids of a process's children, ended ones too until they are waited for."""
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def command_line(pid: int) -> bytes:
    """With a zero byte after each argument; empty if there is no such process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_running(pid: int) -> bool:
    """Whether there is such a process and it is not a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def running_children() -> list[int]:
    """Process ids of this process's children that have not ended."""
    # Python's own, which lives as long as this process once a test has used multiprocessing.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in children(os.getpid()) if child != tracker and is_running(child)]
