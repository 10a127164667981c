"""Front ends from the keeper's side: their processes, and the sockets that they accept connections from.

They outlive engines. Each engine connects to them by sockets that the keeper passes on unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

import structlog

from eventlm.keeper.protocol import EndFrontEnd, FrontEndEnded, FrontEndRuns, ToEngine
from eventlm.system.paired_process import spawn_paired
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.processes import Process
from eventlm.system.system import System

Tell = Callable[[ToEngine], None]

log = structlog.get_logger("eventlm.keeper")


class _Running:
    """A process. tell: the engine that it is connected to."""

    def __init__(self, process: Process, passed: PassedSockets, tell: Tell) -> None:
        self.process = process
        self.passed = passed
        self.tell = tell
        self.watching: asyncio.Task[None] | None = None


class KeptFrontEnds:
    """A front end for each group of listening sockets, by numbers from 1. module: what their processes run.

    spawning: held while a process is spawned.
    """

    def __init__(
        self, system: System, module: str, sockets: Sequence[Sequence[socket.socket]], spawning: asyncio.Lock
    ) -> None:
        self._system = system
        self._module = module
        self._sockets = dict(enumerate(sockets, start=1))
        self._spawning = spawning
        self._running: dict[int, _Running] = {}

    @property
    def numbers(self) -> list[int]:
        """Those that have sockets."""
        return list(self._sockets)

    @property
    def pids(self) -> set[int]:
        """Process ids of all that run."""
        return {running.process.pid for running in self._running.values()}

    async def connect(self, number: int, end: socket.socket, tell: Tell) -> None:
        """Pass an engine's socket on to a front end, whose process is started if there is none. tell: the engine."""
        async with self._spawning:
            try:
                running = self._running.get(number) or await self._start(number, tell)
            except (OSError, KeyError) as error:
                end.close()
                tell(FrontEndRuns(number, error=str(error) if isinstance(error, OSError) else "it was given up"))
                return
        running.tell = tell
        tell(FrontEndRuns(number, running.process.pid))
        running.passed.send(number, end)

    async def _start(self, number: int, tell: Tell) -> _Running:
        """Raises OSError, and KeyError for one without sockets."""
        listening = [bound.fileno() for bound in self._sockets[number]]
        numbers = ",".join(map(str, listening))
        process, end = await spawn_paired(self._system, self._module, numbers, "kept", pass_fds=listening)
        running = self._running[number] = _Running(process, PassedSockets(end, lambda _, sent: sent.close()), tell)
        running.watching = asyncio.create_task(self._watch(number, running), name=f"front end {number}")
        return running

    async def _watch(self, number: int, running: _Running) -> None:
        status = await running.process.wait()
        if self._running.get(number) is running:
            del self._running[number]
        running.passed.close()
        running.tell(FrontEndEnded(number, running.process.pid, status))

    def end(self, message: EndFrontEnd) -> None:
        """Do what an engine asks for."""
        if message.for_good:
            for bound in self._sockets.pop(message.number, ()):
                bound.close()
        if (running := self._running.get(message.number)) is not None:
            self._kill(running)

    async def close(self) -> None:
        """End all of them."""
        for number in self.numbers:
            self.end(EndFrontEnd(number, for_good=True))
        watching = [running.watching for running in self._running.values() if running.watching is not None]
        if watching:
            await asyncio.wait(watching)

    @staticmethod
    def _kill(running: _Running) -> None:
        if running.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                running.process.kill()
