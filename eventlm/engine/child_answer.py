"""A question to a process of its own, so that no step waits for the answer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from eventlm.system.processes import Processes

#: How much of what a process writes to stderr is kept: the end of a traceback.
COMPLAINT_BYTES = 4096


class ChildAnswer(NamedTuple):
    """What the process wrote to stdout, its exit status, and the end of what it wrote to stderr."""

    data: bytes
    exit_code: int | None
    complaint: str


async def ask_child(processes: Processes, module: str, question: bytes, *, timeout_seconds: float) -> ChildAnswer:
    """Run `python -m MODULE`, which reads the question from stdin and writes its answer to stdout.

    Raises TimeoutError. Neither that nor the caller's cancellation leaves a process behind.
    """
    process = await processes.spawn(
        module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_seconds):
            _, data, complaint = await asyncio.gather(
                _send(process.stdin, question), process.stdout.read(), _last_bytes(process.stderr)
            )
            return ChildAnswer(data, await process.wait(), complaint.decode(errors="replace").strip())
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _send(stream: asyncio.StreamWriter, question: bytes) -> None:
    # A process that has ended says why by other ways.
    with contextlib.suppress(ConnectionError):
        stream.write(question)
        await stream.drain()
    stream.close()


async def _last_bytes(stream: asyncio.StreamReader) -> bytes:
    """The last COMPLAINT_BYTES: plug-ins may print much."""
    last = b""
    while received := await stream.read(COMPLAINT_BYTES):
        last = (last + received)[-COMPLAINT_BYTES:]
    return last
