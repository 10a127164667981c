"""One worker process as the engine sees it: spawned fresh, spoken to over ZMQ, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from eventlm.worker.protocol import (
    FromWorker,
    Shutdown,
    StepPayload,
    WorkerSetup,
    decode_from_worker,
    encode,
)

STDERR_FD = 2
#: How long a worker may take to leave when it is asked to.
LEAVE_SECONDS = 5.0


class WorkerProcess:
    """A process started with the interpreter's own spawn: nothing of this process is inherited but stderr."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        #: Mode 0700, so that nobody else can reach the sockets in it.
        self._folder = tempfile.TemporaryDirectory(prefix="eventlm-")
        self._context = zmq.asyncio.Context.instance()
        inbox, outbox = (f"ipc://{Path(self._folder.name) / name}" for name in ("in", "out"))
        self._to_worker: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._to_worker.set(zmq.LINGER, 0)
        self._to_worker.set(zmq.SNDHWM, 0)
        self._to_worker.bind(inbox)
        self._from_worker = self._context.socket(zmq.PULL)
        self._from_worker.set(zmq.LINGER, 0)
        self._from_worker.set(zmq.RCVHWM, 0)
        self._from_worker.bind(outbox)
        self._addresses = (inbox, outbox)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Spawn the process and send it its setup."""
        command = [sys.executable, "-m", "eventlm.worker.process", *self._addresses, str(os.getpid())]
        # What a library prints there is no output of this program.
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR_FD, env=_environment()
        )
        self._to_worker.send(encode(self.setup))

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def receive(self) -> FromWorker | None:
        """The worker's next message, or None once it has died and everything it sent has been read."""
        assert self._process is not None
        message = asyncio.ensure_future(self._from_worker.recv())
        death = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({message, death}, return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                # What it sent before it died is on its way: give it a moment.
                await asyncio.wait({message}, timeout=0.1)
            if not message.done():
                return None
            found: FromWorker = decode_from_worker(message.result())
            return found
        except (msgspec.DecodeError, zmq.ZMQError):
            return None
        finally:
            message.cancel()
            death.cancel()

    def send_step(self, body: bytes, payload: StepPayload) -> None:
        """Ship a launch. A worker that is gone does not hear it; its death is noticed elsewhere."""
        with contextlib.suppress(zmq.Again):
            self._to_worker.send_multipart([body, encode(payload)], flags=zmq.NOBLOCK)

    async def stop(self) -> None:
        """Ask it to leave, and kill it if it does not."""
        with contextlib.suppress(zmq.Again):
            self._to_worker.send(encode(Shutdown()), flags=zmq.NOBLOCK)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LEAVE_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """End it now, and everything that belongs to it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._to_worker.close()
        self._from_worker.close()
        self._folder.cleanup()


def _environment() -> dict[str, Any]:
    """The worker's environment: this one's, and compute threads that sleep while they wait.

    Threads that spin on a core which somebody else needs (this process, say) slow a step down tenfold.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | {"PYTHONUNBUFFERED": "1"}
