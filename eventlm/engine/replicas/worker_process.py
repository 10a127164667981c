"""One worker process from the engine's side: spawned, sent steps, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words
from eventlm.launchers.launcher import ReportedProcess, StartedRank
from eventlm.launchers.spawned_worker import kill_process, spawn_worker
from eventlm.system.clock import Clock
from eventlm.system.clock_map import ClockMap
from eventlm.system.parent_pipe import PipeError
from eventlm.system.system import System
from eventlm.worker.protocol import (
    FromWorker,
    Heartbeat,
    PrepareGrammar,
    Pulse,
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


class StartPatience:
    """How long to wait for a start that makes no progress.

    silence_seconds: for a process that has begun to send, and sends nothing at all; 0: as long.
    """

    def __init__(self, clock: Clock, seconds: float, silence_seconds: float = 0) -> None:
        self.silence_seconds = silence_seconds
        self._clock = clock
        self._ns = round(seconds * 1e9)
        self.renew()

    def renew(self) -> None:
        """There is progress."""
        self._deadline_ns = self._clock.monotonic_ns() + self._ns

    @property
    def left_seconds(self) -> float:
        """What is left of it; 0 or less: nothing."""
        return (self._deadline_ns - self._clock.monotonic_ns()) / 1e9


class WorkerProcess:
    """The process of one worker, from its setup to its end."""

    def __init__(self, system: System, setup: WorkerSetup) -> None:
        self.setup = setup
        self._system = system
        self._spawned: StartedRank | None = None
        self._death: asyncio.Task[int] | None = None
        self._printing: asyncio.Task[None] | None = None
        #: Of a process on another host.
        self.clock: ClockMap | None = None
        #: Why it was given up while it lived, for a person; empty: it was not.
        self.given_up = ""
        #: While it starts: since its last message, counted in waits for one; None before the first.
        self._silent_seconds: float | None = None
        #: The message being waited for. It outlives a call of `receive`: a cancelled future may lose its message.
        self._message: asyncio.Future[bytes] | None = None

    async def start(self, spawned: StartedRank | None = None) -> None:
        """Send its setup to a process that was spawned before, or to a new one.

        Raises EngineUnavailableError if that cannot be spawned.
        """
        try:
            self._spawned = spawned or await spawn_worker(self._system)
        except (OSError, PipeError) as error:
            raise EngineUnavailableError(f"cannot start worker {self.setup.replica}: {error}") from error
        process = self._spawned.process
        self.clock = ClockMap() if self._spawned.host else None
        self._death = asyncio.create_task(process.wait())
        if process.stdout is not None:
            self._printing = asyncio.create_task(self._log_output(process.stdout))
        self.send_frames(encode(self.setup))

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._spawned.process.pid if self._spawned is not None else 0

    @property
    def addresses(self) -> tuple[str, str] | None:
        """Of the pipe to it; None before the start, and if it is on another host."""
        return None if self._spawned is None or self._spawned.host else self._spawned.pipe.addresses

    @property
    def ending(self) -> str:
        """How the process died, for a person; empty while it lives."""
        process = self._spawned.process if self._spawned is not None else None
        if process is None or process.returncode is None:
            return ""
        if isinstance(process, ReportedProcess) and process.reason:
            return f"was lost ({process.reason})"
        return death_in_words(process.returncode)

    @property
    def is_end_of_all(self) -> bool:
        """Whether what ended the process ended all ranks, so that none of them is to blame."""
        process = self._spawned.process if self._spawned is not None else None
        return isinstance(process, ReportedProcess) and process.is_end_of_all

    @property
    def host(self) -> str:
        """Where it runs; empty: on this host."""
        return self._spawned.host if self._spawned is not None else ""

    @property
    def crashed(self) -> bool:
        """Whether the process was ended by a signal that a process raises by what it does, such as SIGSEGV."""
        return self._spawned is not None and -(self._spawned.process.returncode or 0) in CRASH_SIGNALS

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        """The worker's next message, or None once it has died and everything it sent has been read.

        Raises TimeoutError if there is nothing in time. No message is lost by that, nor when the caller is cancelled.
        """
        found = await self._receive(timeout_seconds)
        before = self._spawned.epoch if self._spawned is not None else 0
        while before and found is not None and found.epoch == before:
            # It was sent to the engine before.
            found = await self._receive(timeout_seconds)
        return found

    async def _receive(self, timeout_seconds: float) -> FromWorker | None:
        assert self._death is not None
        assert self._spawned is not None
        if self._message is None:
            self._message = self._spawned.pipe.receive()
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
        except (msgspec.DecodeError, PipeError):
            self.given_up = "sent a message that cannot be read"
            return None
        if self.clock is not None and isinstance(found, Heartbeat) and found.pulse_ns:
            now_ns = self._system.clock.monotonic_ns()
            self.clock.note(sent_ns=found.pulse_ns, there_ns=found.clock_ns, received_ns=now_ns)
        return found

    def pulse(self) -> None:
        """Tell a process on another host that the engine is still there; its answer tells the time there."""
        assert self._spawned is not None
        self._spawned.pipe.pulse(encode(Pulse(self._system.clock.monotonic_ns())))

    def to_here(self, time_ns: int) -> int:
        """A time of the process's clock on this host's."""
        return self.clock.to_here(time_ns) if self.clock is not None else time_ns

    async def answer(
        self, patience: float | StartPatience, on_progress: Callable[[StartProgress], None] | None = None
    ) -> FromWorker | None:
        """The worker's next message that is neither a heartbeat nor progress of its start; None if it dies, or sends
        none in time. Progress renews the time.
        """
        if not isinstance(patience, StartPatience):
            patience = StartPatience(self._system.clock, patience)
        while patience.left_seconds > 0:
            with contextlib.suppress(TimeoutError):
                message = await self._hear(patience)
                if isinstance(message, StartProgress):
                    patience.renew()
                    if on_progress is not None:
                        on_progress(message)
                elif not isinstance(message, Heartbeat):
                    return message
        return None

    async def learn_time(self, patience: StartPatience) -> bool:
        """Wait until the clock of a process that is ready is known; False if it dies, or does not tell in time."""
        while self.clock is not None and not self.clock.is_known and patience.left_seconds > 0:
            with contextlib.suppress(TimeoutError):
                if await self._hear(patience) is None:
                    return False
        return self.clock is None or self.clock.is_known

    async def _hear(self, patience: StartPatience) -> FromWorker | None:
        """As `receive`, for as long as a heartbeat may take; None also for one that has been silent for too long."""
        wait_seconds = min(patience.left_seconds, self.setup.heartbeat_ns / 1e9)
        try:
            message = await self.receive(wait_seconds)
        except TimeoutError:
            if self._silent_seconds is None or not patience.silence_seconds:
                raise
            self._silent_seconds += wait_seconds
            if self._silent_seconds < patience.silence_seconds:
                raise
            self.given_up = f"was silent for {patience.silence_seconds:g} s"
            return None
        self._silent_seconds = 0.0
        return message

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
            setup = self.setup
            rank = {"rank": setup.rank} if setup.layout.num_ranks > 1 else {}
            log.warning("worker says", replica=setup.replica, **rank, epoch=setup.epoch, pid=self.pid, line=text)

    def send_step(self, body: bytes, payload: StepPayload) -> None:
        """Send a launch. It is dropped if the worker has died, which `receive` reports."""
        self.send_frames(body, encode(payload))

    def send(self, message: PrepareGrammar) -> None:
        """Send a message that is no step. It is dropped as there."""
        self.send_frames(encode(message))

    def send_frames(self, *frames: bytes) -> None:
        """Send an encoded message. It is dropped as there."""
        assert self._spawned is not None
        self._spawned.pipe.send(*frames)

    async def stop(self) -> None:
        """Ask it to leave, and kill it if it does not."""
        if self._death is not None and not self._death.done():
            self.send_frames(encode(Shutdown()))
            await asyncio.wait({self._death}, timeout=LEAVE_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """End it now, and everything that belongs to it. Harmless when called twice."""
        try:
            if self._spawned is not None:
                kill_process(self._spawned.process)
                await self._spawned.process.wait()
            if self._printing is not None:
                await asyncio.wait({self._printing}, timeout=LAST_LINES_SECONDS)
        finally:
            if self._printing is not None:
                self._printing.cancel()
            if self._message is not None:
                self._message.cancel()
            if self._spawned is not None:
                self._spawned.pipe.close()
