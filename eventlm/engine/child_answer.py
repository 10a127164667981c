"""A question to a process of its own, so that no step waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from eventlm.system.processes import Processes


class ChildAnswer(NamedTuple):
    """What the process wrote before it ended, and its exit status."""

    data: bytes
    exit_code: int | None


async def ask_child(processes: Processes, module: str, question: bytes, *, timeout_seconds: float) -> ChildAnswer:
    """Run `python -m MODULE`, which reads the question from stdin and writes its answer to stdout.

    Raises TimeoutError. Neither that nor the caller's cancellation leaves a process behind.
    """
    process = await processes.spawn(
        module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            answer, _ = await process.communicate(question)
        return ChildAnswer(answer, process.returncode)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
