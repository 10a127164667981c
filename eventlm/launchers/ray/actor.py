"""What Ray runs for a rank: an actor that starts the worker process on its host, watches it and ends with it.

It is imported by name on each node, so eventlm must be installed there. Its methods run in threads of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import threading

import msgspec
from msgspec import structs

from eventlm._version import __version__
from eventlm.errors import EventLMError
from eventlm.launchers.ray.checkpoint import find_here
from eventlm.launchers.ray.messages import PARENT, HostFacts, LookUp, News, StartRank, encode
from eventlm.models.config import model_fingerprint
from eventlm.system.child_process import dying_with_parent
from eventlm.system.free_memory import free_bytes
from eventlm.system.shared_folder import SharedFolder, StepBoard

#: Calls that are under way at once: one that waits for news, one that kills, and room for those that a driver gave up.
MAX_CALLS = 4
#: How much output is kept for the driver; a process that has printed more waits.
MAX_BACKLOG_BYTES = 1 << 20
_CHUNK_BYTES = 65_536


class RankActor:
    """One rank's actor. A process that is started ends the one before; all of them end with the actor."""

    def __init__(self) -> None:
        self._watched: _Watched | None = None
        self._folder: SharedFolder | None = None
        atexit.register(self._remove_folder)

    def describe(self, look_up: bytes) -> bytes:
        """The `HostFacts` of this host for a `LookUp`."""
        wanted = msgspec.msgpack.decode(look_up, type=LookUp)
        facts = facts_here(wanted)
        if wanted.num_sharing:
            facts = structs.replace(facts, shared=self._new_folder(wanted.num_sharing))
        return encode(facts)

    def _new_folder(self, num_ranks: int) -> str:
        """An empty one for those of a replica's ranks that are started here next, in place of that of the last ones."""
        self._remove_folder()
        self._folder = SharedFolder()
        StepBoard(self._folder.path, size=num_ranks).close()
        return str(self._folder.path)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def start(self, command: bytes) -> int:
        """Start the process of a `StartRank`; its id. Raises OSError."""
        if self._watched is not None:
            self._watched.kill()
        self._watched = _Watched(msgspec.msgpack.decode(command, type=StartRank))
        return self._watched.pid

    def watch(self) -> bytes:
        """Wait for `News` of the process."""
        assert self._watched is not None
        return encode(self._watched.news())

    def kill(self, run: int) -> None:
        """Send SIGKILL to the process, if it is that of this run. Harmless when called twice."""
        if self._watched is not None and self._watched.run == run:
            self._watched.kill()


def facts_here(wanted: LookUp) -> HostFacts:
    """What this host has of a model and a tokenizer. Its address and Ray's id are left out."""
    model = tokenizer = fingerprint = problem = ""
    try:
        model = str(find_here(wanted.model)) if wanted.model is not None else ""
        fingerprint = model_fingerprint(model) if model else ""
        tokenizer = str(find_here(wanted.tokenizer)) if wanted.tokenizer is not None else ""
    except EventLMError as error:
        problem = str(error)
    return HostFacts(
        host=socket.gethostname(),
        version=__version__,
        port=_free_port(),
        free_bytes=free_bytes(),
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        problem=problem,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


class _Watched:
    """A process whose output and end are read by threads."""

    def __init__(self, command: StartRank) -> None:
        # Ray's own processes have a low priority, and give it to what they start. Only root may raise it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        arguments = [str(os.getpid()) if each == PARENT else each for each in command.arguments]
        self._process = subprocess.Popen(
            # By the kernel, since a process that is stopped cannot see that this one has gone.
            dying_with_parent(command.module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**command.defaults, **os.environ, **command.environment},
            start_new_session=True,
        )
        self.run = command.run
        self._changed = threading.Condition()
        self._output = bytearray()
        self._is_read = False
        self._exit_code: int | None = None
        #: Whether `news` has returned the exit code.
        self._is_told = False
        for work in (self._read, self._wait):
            threading.Thread(target=work, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def news(self) -> News:
        """Wait for news and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._is_over or self._has_died_unheard)
            output = bytes(self._output)
            self._output.clear()
            self._is_told = self._exit_code is not None
            self._changed.notify_all()
            return News(output=output, exit_code=self._exit_code, is_over=self._is_over)

    @property
    def _is_over(self) -> bool:
        return self._is_read and self._exit_code is not None

    @property
    def _has_died_unheard(self) -> bool:
        return self._exit_code is not None and not self._is_told

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        with contextlib.suppress(OSError):
            while chunk := os.read(output, _CHUNK_BYTES):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._output) < MAX_BACKLOG_BYTES)
                    self._output += chunk
                    self._changed.notify_all()
        with self._changed:
            self._is_read = True
            self._changed.notify_all()

    def _wait(self) -> None:
        code = self._process.wait()
        with self._changed:
            self._exit_code = code
            self._changed.notify_all()
