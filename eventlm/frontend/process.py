"""One front-end process from the engine's side: spawned, connected by a socket pair, killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from socket import socket

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words
from eventlm.system.paired_process import spawn_paired
from eventlm.system.processes import Process
from eventlm.system.system import System


class FrontEndProcess:
    """A fresh Python process that inherits one end of a socket pair and the listening sockets. `end` is the other."""

    def __init__(self, process: Process, end: socket) -> None:
        self._process = process
        self.end = end
        self.death = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls, system: System, module: str, sockets: Sequence[socket]) -> FrontEndProcess:
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
