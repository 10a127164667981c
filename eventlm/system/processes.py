"""Child processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

if TYPE_CHECKING:
    import asyncio


_PAGE_BYTES = resource.getpagesize()
#: How often a process looks whether its parent lives.
PARENT_POLL_S = 0.5
#: How often a process looks whether orphans have ended, and how long they may take.
_ORPHAN_POLL_S, _ORPHAN_SECONDS = 0.005, 2 * PARENT_POLL_S
_PR_SET_CHILD_SUBREAPER = 36


class ProcessUsage(NamedTuple):
    """What a process has used of its host: time on processors, and memory that it has now."""

    cpu_ns: int
    resident_bytes: int


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

    @property
    def parent_pid(self) -> int:
        """The id of the process that started this one; of another one once that has ended."""
        ...

    async def orphaned(self, parent_pid: int) -> None:
        """Block this thread until this process has another parent than that one."""
        ...

    def adopt_orphans(self) -> None:
        """Let this process be the parent of what its children have started, once they have ended."""
        ...

    async def end_orphans(self, spawned: Container[int]) -> None:
        """Wait until all children but those with these ids have ended. Those that take long are killed."""
        ...

    def exit(self, status: int, line: str = "") -> NoReturn:
        """End this process at once, whatever its threads do. line: written to stderr before."""
        ...

    def usage(self) -> ProcessUsage:
        """What this process has used. Does not wait."""
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

    @property
    def parent_pid(self) -> int:
        """As Processes.parent_pid."""
        return os.getppid()

    async def orphaned(self, parent_pid: int) -> None:
        """As Processes.orphaned."""
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)  # noqa: ASYNC251

    def adopt_orphans(self) -> None:
        """As Processes.adopt_orphans."""
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def end_orphans(self, spawned: Container[int]) -> None:
        """As Processes.end_orphans."""
        import asyncio

        num_polls = 0
        while orphans := [pid for pid in _children() if pid not in spawned]:
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    # A worker that ends by itself leaves no files.
                    if num_polls * _ORPHAN_POLL_S >= _ORPHAN_SECONDS:
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222
            await asyncio.sleep(_ORPHAN_POLL_S)
            num_polls += 1

    def exit(self, status: int, line: str = "") -> NoReturn:
        """As Processes.exit."""
        try:
            if line:
                print(line, file=sys.stderr, flush=True)
        finally:
            # Even if stderr is closed.
            os._exit(status)

    def usage(self) -> ProcessUsage:
        """As Processes.usage. The figures are in memory, so that reading them does not wait."""
        with open("/proc/self/statm", "rb") as file:
            return ProcessUsage(time.process_time_ns(), int(file.read().split()[1]) * _PAGE_BYTES)

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


def _children() -> list[int]:
    """Ids of this process's children, whichever thread started or adopted them."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [int(pid) for pid in (thread / "children").read_text().split()]
    return found
