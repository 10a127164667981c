"""A process on another host, as `eventlm.system.processes.Process`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: How long it takes at most to have a process killed, or to give it up.
KILL_SECONDS = 10.0


class RemoteProcess:
    """Told by others when it starts, prints and ends. `send_kill` is called to have it killed."""

    stdin: asyncio.StreamWriter | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(self, send_kill: Callable[[], None]) -> None:
        #: On its host; 0 before the start.
        self.pid = 0
        self.returncode: int | None = None
        #: Why it ended, where that is not its exit status.
        self.reason = ""
        self.is_end_of_all = False
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader()
        self._send_kill = send_kill
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()

    async def started(self) -> None:
        """Wait until it has started or ended."""
        await self._begun.wait()

    async def wait(self) -> int:
        """As Process.wait."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """As Process.kill. A process that cannot be reached counts as lost after a while. It leaves by itself when
        it hears nothing from the engine.
        """
        if self.returncode is not None:
            raise ProcessLookupError
        self._send_kill()
        asyncio.get_running_loop().call_later(KILL_SECONDS, self.note_end, 1, "its host cannot be reached")

    def note_start(self, pid: int) -> None:
        """It runs."""
        self.pid = pid
        self._begun.set()

    def note_output(self, output: bytes) -> None:
        """It has printed this; empty: it will print no more."""
        assert self.stdout is not None
        if output:
            self.stdout.feed_data(output)
        elif not self.stdout.at_eof():
            self.stdout.feed_eof()

    def note_end(self, exit_code: int, reason: str = "", *, of_all: bool = False) -> None:
        """It has ended, for a reason of its own or one that ended all others, too. Only the first end counts."""
        if self.returncode is None:
            self.returncode, self.reason, self.is_end_of_all = exit_code, reason, of_all
        self._begun.set()
        self._ended.set()
