"""Message pipes to child processes: queues of messages in both directions, and streams of frames."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio


class ParentPipe(Protocol):
    """The parent's end of a pipe; the child's is `eventlm.system.child_pipe`. addresses: the child's arguments."""

    @property
    def addresses(self) -> tuple[str, str]: ...

    def send(self, *frames: bytes) -> None:
        """Queue a message. It is dropped if the child has died."""
        ...

    def pulse(self, message: bytes) -> None:
        """Send a message by a way of its own, to a thread of a child on another host. It is dropped on this one, and
        where the child is not connected.
        """
        ...

    def receive(self) -> asyncio.Future[bytes]:
        """The next message of one frame. A future that is cancelled may lose it."""
        ...

    def close(self) -> None:
        """A second call does nothing."""
        ...


class Pipes(Protocol):
    """Makes pipes."""

    def open(self) -> ParentPipe:
        """A new pipe. Raises OSError or `eventlm.system.parent_pipe.PipeError`."""
        ...

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Both ends of a stream for `eventlm.system.frames`. It has no name, so no other process can connect to it, and
        end of file means that the other side died. Raises OSError.
        """
        ...


class SystemPipes:
    """ZeroMQ and sockets."""

    def open(self) -> ParentPipe:
        """As Pipes.open."""
        # Not at the top: a simulation has a system, too, and need not wait for asyncio and ZeroMQ.
        from eventlm.system.parent_pipe import ZmqParentPipe

        return ZmqParentPipe()

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """As Pipes.pair."""
        return socket.socketpair()
