"""One worker process as the engine sees it: spawned fresh, spoken to over ZMQ, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words
from eventlm.worker.protocol import (
    FromWorker,
    Heartbeat,
    PrepareGrammar,
    Shutdown,
    StartProgress,
    StepPayload,
    WorkerSetup,
    decode_from_worker,
    encode,
)

#: How long what a dead worker has printed may be on its way; without a limit a child of its own could keep us waiting.
LAST_LINES_SECONDS = 2.0
#: A line of a worker's output that is longer is logged in parts.
MAX_LINE_BYTES = 8192
#: How long a worker may take to leave when it is asked to.
LEAVE_SECONDS = 5.0
#: How long the last messages of a worker that has died may be on their way.
LAST_MESSAGES_SECONDS = 0.1
#: Raised in a process by its own code.
CRASH_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT})


log = structlog.get_logger("eventlm.worker")


class WorkerProcess:
    """A process started with the interpreter's own spawn: nothing of this process is inherited.

    Raises EngineUnavailableError if the system has no more sockets.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._to_worker: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
            self._from_worker = zmq.asyncio.Context.instance().socket(zmq.PULL)
        except zmq.ZMQError as error:
            raise EngineUnavailableError(f"cannot start worker {setup.replica}: {error}") from error
        self._process: asyncio.subprocess.Process | None = None
        self._death: asyncio.Task[int] | None = None
        self._printing: asyncio.Task[None] | None = None
        #: The message that is waited for. Kept over calls of `receive`: whoever cancels it may lose what it has got.
        self._message: asyncio.Future[bytes] | None = None

    async def start(self) -> None:
        """Spawn the process and send it its setup. Raises EngineUnavailableError if that cannot be done."""
        try:
            inbox, outbox = self._open_sockets()
            # -P: no code from the folder that the engine happens to run in.
            command = [sys.executable, "-P", "-m", "eventlm.worker.process", inbox, outbox, str(os.getpid())]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # What a library prints is no output of this program, and is logged like its other lines.
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
                # Ctrl-C and Ctrl-Z go to the whole foreground group; the engine decides what becomes of its workers.
                start_new_session=True,
            )
        except (OSError, zmq.ZMQError) as error:
            raise EngineUnavailableError(f"cannot start worker {self.setup.replica}: {error}") from error
        self._death = asyncio.create_task(self._process.wait())
        assert self._process.stdout is not None
        self._printing = asyncio.create_task(self._log_output(self._process.stdout))
        self._to_worker.send(encode(self.setup))

    def _open_sockets(self) -> tuple[str, str]:
        """Connect to the worker's inbox, bind its outbox; their addresses.

        The inbox is the worker's to bind: a socket that connects takes messages before there is anybody at the other
        end, while one that is bound would block until then, for ever if the worker dies first.
        """
        #: Mode 0700, so that nobody else can reach the sockets in it.
        self._folder = tempfile.TemporaryDirectory(prefix="eventlm-")
        inbox, outbox = (f"ipc://{Path(self._folder.name) / name}" for name in ("in", "out"))
        self._to_worker.set(zmq.LINGER, 0)
        self._to_worker.set(zmq.SNDHWM, 0)
        self._to_worker.set(zmq.RECONNECT_IVL, 10)
        self._to_worker.connect(inbox)
        self._from_worker.set(zmq.LINGER, 0)
        self._from_worker.set(zmq.RCVHWM, 0)
        self._from_worker.bind(outbox)
        return inbox, outbox

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def ending(self) -> str:
        """How the process died, for a person; empty while it lives."""
        code = self._process.returncode if self._process is not None else None
        return "" if code is None else death_in_words(code)

    @property
    def crashed(self) -> bool:
        """Whether the process was ended by a signal that a process raises by what it does, such as SIGSEGV."""
        return self._process is not None and -(self._process.returncode or 0) in CRASH_SIGNALS

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        """The worker's next message, or None once it has died and everything it sent has been read.

        Raises TimeoutError if there is nothing in time. No message is lost by that, nor when the caller is cancelled.
        """
        assert self._death is not None
        if self._message is None:
            self._message = asyncio.ensure_future(self._from_worker.recv())
        message, death = self._message, self._death
        if not message.done():
            either: set[asyncio.Future[Any]] = {message, death}
            await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not message.done() and death.done():
            await asyncio.wait({message}, timeout=LAST_MESSAGES_SECONDS)
        if not message.done():
            if death.done():
                return None
            raise TimeoutError
        self._message = None
        try:
            found: FromWorker = decode_from_worker(message.result())
        except (msgspec.DecodeError, zmq.ZMQError):
            return None
        return found

    async def answer(
        self, timeout_seconds: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> FromWorker | None:
        """The worker's next message besides that it lives and how its start goes; None if it dies, or says nothing in
        time. Its start has as much time again whenever it goes on.
        """
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                message = await self.receive(left)
                if isinstance(message, StartProgress):
                    deadline = time.monotonic() + timeout_seconds
                    if on_progress is not None:
                        on_progress(message)
                elif not isinstance(message, Heartbeat):
                    return message
        return None

    async def _log_output(self, output: asyncio.StreamReader) -> None:
        """Log what the worker and its libraries print, line by line, to its end."""
        rest = b""
        while chunk := await output.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            log.warning("worker says", replica=self.setup.replica, epoch=self.setup.epoch, pid=self.pid, line=text)

    def send_step(self, body: bytes, payload: StepPayload) -> None:
        """Ship a launch. A worker that is gone does not hear it; its death is noticed elsewhere."""
        with contextlib.suppress(zmq.Again):
            self._to_worker.send_multipart([body, encode(payload)], flags=zmq.NOBLOCK)

    def send(self, message: PrepareGrammar) -> None:
        """Send what is no step. As there, a worker that is gone does not hear it."""
        with contextlib.suppress(zmq.Again):
            self._to_worker.send(encode(message), flags=zmq.NOBLOCK)

    async def stop(self) -> None:
        """Ask it to leave, and kill it if it does not."""
        if self._death is not None and not self._death.done():
            with contextlib.suppress(zmq.Again):
                self._to_worker.send(encode(Shutdown()), flags=zmq.NOBLOCK)
            await asyncio.wait({self._death}, timeout=LEAVE_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """End it now, and everything that belongs to it. Harmless when called twice."""
        try:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            if self._printing is not None:
                await asyncio.wait({self._printing}, timeout=LAST_LINES_SECONDS)
        finally:
            if self._printing is not None:
                self._printing.cancel()
            if self._message is not None:
                self._message.cancel()
            self._to_worker.close()
            self._from_worker.close()
            if self._folder is not None:
                self._folder.cleanup()


def _environment() -> dict[str, Any]:
    """The worker's environment: this one's, compute threads that sleep while they wait, and GPUs in the order of NVML.

    Threads that spin on a core which somebody else needs (this process, say) slow a step down tenfold.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | os.environ | {"PYTHONUNBUFFERED": "1"}
