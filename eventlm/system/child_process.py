"""Child processes that run a program to its end: they die with this process, and Ctrl-C ends the wait for them at once.

A launcher in the child asks the kernel for that, because code between fork and exec is unsafe beside threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

POLL_SECONDS = 0.1

# PR_SET_PDEATHSIG is 1.
_LAUNCHER = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
program = sys.argv[0] = sys.argv.pop(1)
if program.endswith(".py"):
    runpy.run_path(program, run_name="__main__")
else:
    runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


class Ended(NamedTuple):
    """How a child ended: its exit status (negative: the signal) and what it printed."""

    code: int
    output: str
    errors: str


def dying_with_parent(program: str | Path, *arguments: str) -> list[str]:
    """The command that runs a module, or a file `.py`, until the thread that starts it has ended."""
    return [sys.executable, "-P", "-c", _LAUNCHER, str(program), *arguments]


def run_child(
    program: str | Path,
    *arguments: str,
    folder: Path | None = None,
    on_poll: Callable[[str], None] | None = None,
    environment: dict[str, str] | None = None,
    shows_errors: bool = False,
) -> Ended:
    """Run a module, or a file `.py`, to its end. It keeps its temporary files under `folder`.

    `on_poll` gets what the child has printed so far, several times a second. With `shows_errors` its stderr is ours.
    """
    command = dying_with_parent(program, *arguments)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output, errors = Path(scratch, "stdout"), Path(scratch, "stderr")
        with output.open("w") as out, errors.open("w") as err, _interruptible():
            # A process group of its own: Ctrl-C reaches this process only, which then ends the child.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if shows_errors else err,
                env=os.environ | {"TMPDIR": scratch} | (environment or {}),
                process_group=0,
            )
            try:
                while child.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(POLL_SECONDS)
                    if on_poll is not None:
                        on_poll(output.read_text(errors="replace"))
            finally:
                child.kill()
                child.wait()
        return Ended(child.returncode, output.read_text(errors="replace"), errors.read_text(errors="replace"))


def last_line(errors: str, code: int) -> str:
    """The last line that a child printed; how it ended if there is none."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if code < 0:
        return f"killed by signal {-code}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return lines[-1].removeprefix("ERROR: ") if lines else f"exit status {code}"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, also under an event loop that would only cancel its task."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
