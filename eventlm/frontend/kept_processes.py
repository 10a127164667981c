"""Front-end processes of the keeper: they outlive the engine, which connects to them by sockets that it passes on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words
from eventlm.frontend.process import FrontEndProcess
from eventlm.keeper.protocol import EndFrontEnd, FrontEndEnded, FrontEndRuns
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.system import System


class KeptFrontEndProcess:
    """One process. kill: asks the keeper to kill it."""

    def __init__(self, pid: int, end: socket.socket, kill: Callable[[], None]) -> None:
        self.pid = pid
        self.end = end
        #: Its exit status, as `Process.returncode`.
        self.death: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._kill = kill
        self.is_let_go = False

    @property
    def left_in_order(self) -> bool:
        """As FrontEndProcess.left_in_order."""
        return self.death.done() and self.death.result() == 0

    @property
    def ending(self) -> str:
        """As FrontEndProcess.ending."""
        return death_in_words(self.death.result()) if self.death.done() else ""

    async def kill(self) -> None:
        """As FrontEndProcess.kill."""
        if not self.is_let_go and not self.death.done():
            self._kill()
            await asyncio.wait({self.death})


class KeptProcesses:
    """As `FrontEndProcesses`. passed: to the keeper. send: sends it a message. numbers, address: as TakeOver has
    them.
    """

    def __init__(
        self,
        system: System,
        passed: PassedSockets,
        send: Callable[[EndFrontEnd], None],
        numbers: Sequence[int],
        address: tuple[str, int],
    ) -> None:
        self.numbers = numbers
        self.address = address
        self._system = system
        self._passed = passed
        self._send = send
        self._is_let_go = False
        #: Ends of those that are being started.
        self._starting: dict[int, tuple[socket.socket, asyncio.Future[FrontEndProcess]]] = {}
        self._running: dict[int, KeptFrontEndProcess] = {}

    async def start(self, number: int) -> FrontEndProcess:
        """As FrontEndProcesses.start."""
        try:
            ours, theirs = self._system.pipes.pair()
        except OSError as error:
            raise EngineUnavailableError(f"cannot connect to a front end: {error}") from error
        started: asyncio.Future[FrontEndProcess] = asyncio.get_running_loop().create_future()
        self._starting[number] = (ours, started)
        self._passed.send(number, theirs)
        return await started

    def close(self, number: int) -> None:
        """As FrontEndProcesses.close."""
        if not self._is_let_go:
            self._send(EndFrontEnd(number, for_good=True))

    def let_go(self) -> None:
        """As FrontEndProcesses.let_go."""
        self._is_let_go = True
        for process in self._running.values():
            process.is_let_go = True

    def take(self, message: FrontEndRuns | FrontEndEnded) -> None:
        """Handle a message from the keeper."""
        if isinstance(message, FrontEndEnded):
            process = self._running.get(message.number)
            if process is not None and process.pid == message.pid and not process.death.done():
                process.death.set_result(message.status)
            return
        ours, started = self._starting.pop(message.number)
        if message.error or started.done():
            ours.close()
        if started.done():
            return
        if message.error:
            started.set_exception(EngineUnavailableError(f"cannot start a front end: {message.error}"))
            return
        process = KeptFrontEndProcess(message.pid, ours, lambda: self._send(EndFrontEnd(message.number)))
        self._running[message.number] = process
        started.set_result(process)
