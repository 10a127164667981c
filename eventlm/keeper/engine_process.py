"""One process of an engine from the keeper's side: spawned, told what to do, watched, killed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

from eventlm.errors import EventLMError
from eventlm.formatting import death_in_words
from eventlm.keeper.protocol import (
    EndFrontEnd,
    EngineBeat,
    EnginePrepared,
    EngineWorkers,
    Prepare,
    RestartRequest,
    Serving,
    StartFailed,
    ToEngine,
    decode_from_engine,
    encode,
)
from eventlm.system.frames import FrameConnection
from eventlm.system.left_process import LeftProcess
from eventlm.system.paired_process import spawn_paired
from eventlm.system.processes import Process
from eventlm.system.system import System

#: How long a process may take to exit after it has closed its connection.
LEAVE_SECONDS = 5.0


class KeeperError(EventLMError):
    """The engine cannot be kept running."""


class EngineProcess:
    """A fresh Python process that inherits one end of a socket pair and the listening sockets."""

    def __init__(
        self,
        process: Process,
        config: bytes,
        on_restart: Callable[[EngineProcess, int], None],
        on_end_front_end: Callable[[EndFrontEnd], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pid = process.pid
        #: What it serves.
        self.config = config
        self.prepared: asyncio.Future[EnginePrepared] = loop.create_future()
        self.serving: asyncio.Future[None] = loop.create_future()
        self.failure: StartFailed | None = None
        self._process = process
        self._on_restart = on_restart
        self._on_end_front_end = on_end_front_end
        self._connection: FrameConnection | None = None
        self._lost: asyncio.Future[None] = loop.create_future()
        #: The workers that it would leave to another one; None before it has any.
        self.workers: list[LeftProcess] | None = None
        self._num_beats = 0
        #: Why it was killed.
        self._killed_for = ""
        #: Completes when it has ended, and all that it has sent has been read.
        self.gone = asyncio.create_task(self._wait_until_gone(), name=f"engine {process.pid}")

    @classmethod
    async def spawn(
        cls,
        system: System,
        module: str,
        sockets: Sequence[socket.socket],
        prepare: Prepare,
        on_restart: Callable[[EngineProcess, int], None],
        on_end_front_end: Callable[[EndFrontEnd], None] = lambda _: None,
    ) -> EngineProcess:
        """Start `python -m MODULE END SOCKET,...`, file descriptors all. Raises KeeperError.

        on_restart: gets the process and the number of its request when an operator asks it for a restart.
        on_end_front_end: gets what the process asks for.
        """
        listening = [each.fileno() for each in sockets]
        try:
            process, ours = await spawn_paired(system, module, ",".join(map(str, listening)), pass_fds=listening)
        except OSError as error:
            raise KeeperError(f"cannot start an engine: {error}") from error
        engine = cls(process, prepare.config, on_restart, on_end_front_end)
        engine._connection = await FrameConnection.open(ours, engine._receive, engine._lose)
        engine.send(prepare)
        return engine

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests, or has done so."""
        return self.serving.done()

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.failure is not None:
            return self.failure.message
        if self.status == 0:
            return "ended"
        return self._killed_for or death_in_words(self.status)

    @property
    def status(self) -> int:
        """Its exit status, once it is gone; -N: signal N has ended it."""
        assert self._process.returncode is not None
        return self._process.returncode

    def send(self, message: ToEngine) -> None:
        """Send a message. It is dropped if the process has ended."""
        if self._connection is not None:
            self._connection.send(encode(message))

    async def prepared_or_gone(self, timeout_seconds: float | None = None) -> None:
        """Wait until it is the one or the other, at most so long."""
        either: set[asyncio.Future[Any]] = {self.prepared, self.gone}
        await asyncio.wait(either, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)

    async def watch(self, beat_seconds: float, silence_seconds: float, start_seconds: float) -> None:
        """Wait until it is gone. It is killed if it sends nothing for `silence_seconds`, and before it serves for
        `start_seconds`; 0: it may be silent as long as it likes.

        Silence is counted in waits, not by a clock: time in which the keeper itself could not listen must not count.
        """
        num_beats, num_silent = self._num_beats, 0
        while not self._lost.done():
            await asyncio.wait({self._lost}, timeout=beat_seconds)
            num_silent = 0 if self._num_beats != num_beats else num_silent + 1
            num_beats = self._num_beats
            limit_seconds = silence_seconds if self.is_serving else start_seconds
            if limit_seconds and num_silent * beat_seconds >= limit_seconds:
                await self.kill(f"sent no heartbeat for {limit_seconds:.0f} s")
        await asyncio.wait({self.gone}, timeout=LEAVE_SECONDS)
        await self.kill("closed its connection")

    async def kill(self, reason: str = "") -> None:
        """Kill it. Harmless when it is gone."""
        if self._process.returncode is None:
            self._killed_for = reason
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait({self.gone})
        if self._connection is not None:
            self._connection.abort()

    async def _wait_until_gone(self) -> None:
        await self._process.wait()
        # What it has sent before its end may still be on its way.
        await asyncio.wait({self._lost}, timeout=LEAVE_SECONDS)

    def _lose(self) -> None:
        self._lost.set_result(None)

    def _receive(self, body: bytes) -> None:
        message = decode_from_engine(body)
        match message:
            case EngineBeat():
                self._num_beats += 1
            case EnginePrepared():
                self.config = message.config
                self.prepared.set_result(message)
            case EngineWorkers():
                self.workers = message.workers
            case Serving():
                self.serving.set_result(None)
            case StartFailed():
                self.failure = message
            case RestartRequest():
                self._on_restart(self, message.id)
            case EndFrontEnd():
                self._on_end_front_end(message)
