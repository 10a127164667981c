"""A child process at the other end of a socket pair, which is closed when either of the two dies."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventlm.system.processes import Process

if TYPE_CHECKING:
    from eventlm.system.system import System

_STDERR = 2


async def spawn_paired(
    system: System, module: str, *arguments: str, pass_fds: Sequence[int] = ()
) -> tuple[Process, socket.socket]:
    """Start `python -m MODULE END ARGUMENTS`, where END is the file descriptor of its end; the process and our end.

    pass_fds: what else it inherits. Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, system.pipes.pair())
        process = await system.processes.spawn(
            module,
            str(theirs.fileno()),
            *arguments,
            # Output that a library prints must not mix with this program's.
            stdout=_STDERR,
            pass_fds=(theirs.fileno(), *pass_fds),
        )
        stack.pop_all()
    theirs.close()
    return process, ours


def inherited_sockets(*arguments: str) -> list[socket.socket]:
    """In a process that was started so: the sockets with these file descriptors, several of which commas may separate.
    Its own children do not inherit them.
    """
    found = [socket.socket(fileno=int(number)) for argument in arguments for number in argument.split(",")]
    for each in found:
        each.set_inheritable(False)
    return found
