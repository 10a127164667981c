"""A child process that goes on when its parent has died, and gets another one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path

from msgspec import Struct


class LeftProcess(Struct, frozen=True, array_like=True):
    """Where to find it: its id, and the addresses of the pipe to it. about: what its parent says of it."""

    pid: int
    addresses: tuple[str, str]
    about: bytes


def remove_pipe(addresses: tuple[str, str]) -> None:
    """Remove the files of a pipe that has no end any more."""
    shutil.rmtree(Path(addresses[0].removeprefix("ipc://")).parent, ignore_errors=True)


class AdoptedProcess:
    """One of this host that another process has started, as `eventlm.launchers.launcher.ReportedProcess`. Its exit
    status is never known. Raises OSError if there is no such process.
    """

    is_end_of_all = False
    stdout = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.reason = ""
        self._fd = os.pidfd_open(pid)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._fd, self._note_end)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.returncode, self.reason = 1, "its process has ended"
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        """As RankProcess.wait."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """As RankProcess.kill."""
        if self.returncode is not None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
