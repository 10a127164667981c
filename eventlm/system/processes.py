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

    from eventlm.system.left_process import AdoptedProcess


_PAGE_BYTES = resource.getpagesize()
#: The environment variable by which a process learns the id of its parent's keeper.
KEEPER_VARIABLE = "EVENTLM_KEEPER_PID"
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

    @property
    def keeper_pid(self) -> int:
        """The id of the process that becomes the parent of what this one leaves, until another one takes its place; 0:
        there is none.
        """
        ...

    async def orphaned(self, parent_pid: int) -> None:
        """Block this thread until this process has another parent than that one."""
        ...

    def is_running(self, pid: int) -> bool:
        """Whether there is a process with this id."""
        ...

    def adopt(self, pid: int) -> AdoptedProcess:
        """A process that is left of one that has died. Raises OSError if it is gone."""
        ...

    def print_to(self, pid: int) -> None:
        """Let what this process prints go where that one's errors go, and nowhere if that cannot be."""
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
    """Processes of the host. is_kept: whether this one's parent is a keeper."""

    def __init__(self, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept

    @property
    def keeper_pid(self) -> int:
        """As Processes.keeper_pid."""
        return os.getppid() if self._is_kept else 0

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

    def is_running(self, pid: int) -> bool:
        """As Processes.is_running."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def adopt(self, pid: int) -> AdoptedProcess:
        """As Processes.adopt."""
        from eventlm.system.left_process import AdoptedProcess

        return AdoptedProcess(pid)

    def print_to(self, pid: int) -> None:
        """As Processes.print_to."""
        try:
            target = os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(target, fd)
        os.close(target)

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
