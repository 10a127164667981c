"""Child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio


class Process(Protocol):
    """A child process. `asyncio.subprocess.Process` is one."""

    pid: int

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """Its input, if that is a pipe."""
        ...

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """Its output, if that is a pipe."""
        ...

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """Its errors, if they are a pipe."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status; -N if signal N ended it; None while it runs."""
        ...

    async def wait(self) -> int:
        """Its exit status once it has ended."""
        ...

    async def communicate(self, input: bytes) -> tuple[bytes, bytes]:
        """Send all of its input; what it writes to stdout and stderr until it ends."""
        ...

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if it has ended."""
        ...


class Processes(Protocol):
    """Starts child processes."""

    @property
    def pid(self) -> int:
        """The id of this process."""
        ...

    async def spawn(
        self,
        module: str,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        stdout: int,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Run a module in a fresh interpreter, which imports nothing from the current folder. Raises OSError.

        stdin, stdout, stderr: as in `subprocess`. environment: variables that it gets where this process has none
        of that name. Ctrl-C and Ctrl-Z go to a terminal's whole foreground group, and this process alone decides when
        its children end, so each has a session of its own.
        """
        ...


class SystemProcesses:
    """Processes of the host."""

    @property
    def pid(self) -> int:
        """As Processes.pid."""
        return os.getpid()

    async def spawn(
        self,
        module: str,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        stdout: int,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """As Processes.spawn."""
        # Not at the top: a simulation has a system, too, and need not wait for asyncio.
        import asyncio

        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            *arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**(environment or {}), **os.environ},
            pass_fds=pass_fds,
            start_new_session=True,
        )
