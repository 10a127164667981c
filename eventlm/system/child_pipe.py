"""The child's end of a message pipe. It imports no asyncio."""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

from eventlm.system.remote_ends import RemoteEnds

#: How long a process that ends tries to get rid of what it has sent.
LINGER_MS = 1000


class Sender:
    """Sends messages. For use in one thread at a time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: bytes) -> None:
        """Queue a message."""
        self._socket.send(message)

    def close(self) -> None:
        """Queue nothing more."""
        self._socket.close()


class Pulses:
    """Receives pulses. For use in one thread at a time."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, timeout_ms: int) -> bytes | None:
        """The next one; None if none comes in time."""
        return self._socket.recv() if self._socket.poll(timeout_ms) else None

    def close(self) -> None:
        """Receive nothing more."""
        self._socket.close()


class ChildPipe:
    """Opened with the two addresses of a ParentPipe, and with `ends` where that is on another host."""

    def __init__(self, inbox: str, outbox: str, ends: RemoteEnds | None = None) -> None:
        self._addresses = (inbox, outbox)
        self._ends = ends
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        if ends is None:
            self._inbox.bind(inbox)
        else:
            ends.protect(self._inbox)
            self._inbox.connect(inbox)

    def poll(self, timeout_ms: int) -> bool:
        """Wait so long for a message; whether there is one."""
        return bool(self._inbox.poll(timeout_ms))

    def receive(self) -> list[bytes]:
        """Wait for the frames of the next message."""
        return self._inbox.recv_multipart()

    def sender(self) -> Sender:
        """A new sender, to be closed before the pipe."""
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, LINGER_MS)
        if self._ends is not None:
            self._ends.protect(socket)
        socket.connect(self._addresses[1])
        return Sender(socket)

    def pulses(self) -> Pulses | None:
        """The parent's pulses, to be closed before the pipe; None if it is on this host and sends none."""
        if self._ends is None:
            return None
        socket = self._context.socket(zmq.PULL)
        self._ends.protect(socket)
        socket.connect(self._ends.pulses)
        return Pulses(socket)

    def close(self) -> None:
        """Wait until all messages are sent, at most `LINGER_MS`: those of a process that ends earlier are lost."""
        self._inbox.close()
        self._context.term()

    def remove(self) -> None:
        """Remove the files of a pipe whose parent has died."""
        if self._ends is not None:
            return
        paths = [Path(address.removeprefix("ipc://")) for address in self._addresses]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            paths[0].parent.rmdir()
