"""One front-end process from the engine's side: spawned, connected by a socket pair, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from eventlm.engine.request import EngineUnavailableError
from eventlm.formatting import death_in_words

STDERR = 2


class FrontEndProcess:
    """A fresh Python process that inherits one end of a socket pair and the listening sockets.

    The pair has no name, so no other process can connect to it. End of file on it means that the other side died.
    """

    def __init__(self, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self._process = process
        #: The engine's end of the pair.
        self.end = end
        self.death = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls, module: str, sockets: Sequence[socket.socket]) -> FrontEndProcess:
        """Start `python -m MODULE END SOCKET,...`, file descriptors all. Raises EngineUnavailableError."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EngineUnavailableError(f"cannot start a front end: {error}") from error
        listening = [each.fileno() for each in sockets]
        # -P: import nothing from the current folder.
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), ",".join(map(str, listening))]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                # Output that a library prints must not mix with this program's.
                stdout=STDERR,
                pass_fds=(theirs.fileno(), *listening),
                # Ctrl-C and Ctrl-Z go to the whole foreground group; the engine alone decides when front ends end.
                start_new_session=True,
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise EngineUnavailableError(f"cannot start a front end: {error}") from error
            raise
        finally:
            theirs.close()
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
                os.kill(self.pid, signal.SIGKILL)
        await asyncio.wait({self.death})
