"""The child's end of a message pipe. It imports no asyncio."""

from __future__ import annotations

import contextlib
from pathlib import Path

import zmq

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


class ChildPipe:
    """Opened with the two addresses of a ParentPipe."""

    def __init__(self, inbox: str, outbox: str) -> None:
        self._addresses = (inbox, outbox)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(inbox)

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
        socket.connect(self._addresses[1])
        return Sender(socket)

    def close(self) -> None:
        """Wait until all messages are sent, at most `LINGER_MS`: those of a process that ends earlier are lost."""
        self._inbox.close()
        self._context.term()

    def remove(self) -> None:
        """Remove the files of a pipe whose parent has died."""
        paths = [Path(address.removeprefix("ipc://")) for address in self._addresses]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            paths[0].parent.rmdir()
