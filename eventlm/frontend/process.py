"""Front-end processes from the engine's side: started, connected by a socket pair, killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from socket import socket
from typing import Any, Protocol

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words
from eventlm.system.paired_process import spawn_paired
from eventlm.system.processes import Process
from eventlm.system.system import System


class FrontEndProcess(Protocol):
    """One process. `end` is this end of the connection to it; `death` completes when it has ended."""

    end: socket
    death: asyncio.Future[Any]

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def left_in_order(self) -> bool:
        """Whether it has exited with status 0."""
        ...

    @property
    def ending(self) -> str:
        """How it ended, in words; empty while it runs."""
        ...

    async def kill(self) -> None:
        """Kill it. Harmless when it has ended."""
        ...


class FrontEndProcesses(Protocol):
    """Where front ends run. numbers: of those that can be started. address: where they listen."""

    @property
    def numbers(self) -> Sequence[int]: ...

    @property
    def address(self) -> tuple[str, int]: ...

    async def start(self, number: int) -> FrontEndProcess:
        """Start a process, or connect to the one that an engine before has started. Raises EngineUnavailableError."""
        ...

    def close(self, number: int) -> None:
        """There will be no further process: close the sockets, so that the kernel sends connections to the others."""
        ...

    def let_go(self) -> None:
        """This engine ends before its time. What outlives it is not ended."""
        ...


class OwnFrontEnds:
    """Children of this process, which end with it. Each inherits a group of listening sockets. module: what all run."""

    def __init__(self, system: System, module: str, sockets: Sequence[Sequence[socket]]) -> None:
        self._system = system
        self._module = module
        self._sockets = sockets

    @property
    def numbers(self) -> Sequence[int]:
        """As FrontEndProcesses.numbers."""
        return range(1, len(self._sockets) + 1)

    @property
    def address(self) -> tuple[str, int]:
        """As FrontEndProcesses.address."""
        host, port = self._sockets[0][0].getsockname()[:2]
        return host, port

    async def start(self, number: int) -> FrontEndProcess:
        """As FrontEndProcesses.start."""
        return await SpawnedFrontEnd.spawn(self._system, self._module, self._sockets[number - 1])

    def close(self, number: int) -> None:
        """As FrontEndProcesses.close."""
        for bound in self._sockets[number - 1]:
            bound.close()

    def let_go(self) -> None:
        """As FrontEndProcesses.let_go: they end with this process."""


class SpawnedFrontEnd:
    """A fresh Python process that inherits one end of a socket pair and the listening sockets. `end` is the other."""

    def __init__(self, process: Process, end: socket) -> None:
        self._process = process
        self.end = end
        self.death: asyncio.Future[Any] = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls, system: System, module: str, sockets: Sequence[socket]) -> SpawnedFrontEnd:
        """Start `python -m MODULE END SOCKET,...`, file descriptors all. Raises EngineUnavailableError."""
        listening = [each.fileno() for each in sockets]
        try:
            process, ours = await spawn_paired(system, module, ",".join(map(str, listening)), pass_fds=listening)
        except OSError as error:
            raise EngineUnavailableError(f"cannot start a front end: {error}") from error
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def left_in_order(self) -> bool:
        """Whether it has exited with status 0."""
        return self._process.returncode == 0

    @property
    def ending(self) -> str:
        """How it ended, in words; empty while it runs."""
        code = self._process.returncode
        return "" if code is None else death_in_words(code)

    async def kill(self) -> None:
        """Kill it. Harmless when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait({self.death})
