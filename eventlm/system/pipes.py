"""Message pipes to child processes: queues of messages in both directions, and streams of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    import socket

    from eventlm.system.remote_ends import RemoteEnds


class ParentPipe(Protocol):
    """The parent's end of a pipe. addresses: by which the child opens its end."""

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


class Sender(Protocol):
    """Sends messages. For use in one thread at a time."""

    def send(self, message: bytes) -> None:
        """Queue a message."""
        ...

    def close(self) -> None:
        """Queue nothing more."""
        ...


class Pulses(Protocol):
    """Receives pulses. For use in one thread at a time."""

    async def receive(self, timeout_seconds: float) -> bytes | None:
        """Block this thread until the next one comes; None if none does in time."""
        ...

    def close(self) -> None:
        """Receive nothing more."""
        ...


class ChildPipe(Protocol):
    """The child's end of a pipe."""

    async def wait(self, seconds: float) -> bool:
        """Block this thread until there is a message, at most so long. False: none was there just before the end."""
        ...

    async def receive(self) -> list[bytes]:
        """Block this thread until there is a message; its frames."""
        ...

    def sender(self) -> Sender:
        """A new sender, to be closed before the pipe."""
        ...

    def pulses(self) -> Pulses | None:
        """The parent's pulses, to be closed before the pipe; None if it is on this host and sends none."""
        ...

    def close(self) -> None:
        """Return once all messages are sent, or cannot be within a second. What the process still has to send when it
        ends without that is lost.
        """
        ...

    def remove(self) -> None:
        """Remove what is left of a pipe whose parent has died."""
        ...


class Pipes(Protocol):
    """Makes pipes."""

    def open(self) -> ParentPipe:
        """A new pipe. Raises OSError or `eventlm.system.parent_pipe.PipeError`."""
        ...

    def reopen(self, addresses: tuple[str, str]) -> ParentPipe:
        """The parent's end of a pipe whose parent has died, on this host. Messages to that one may still come. Raises
        as `open`.
        """
        ...

    def open_child(self, inbox: str, outbox: str, ends: RemoteEnds | None = None) -> ChildPipe:
        """The child's end of the pipe that has these addresses. ends: of one whose parent is on another host."""
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
        # Imports are here so that each process loads what it needs: a worker no asyncio, a simulation no ZeroMQ.
        from eventlm.system.parent_pipe import ZmqParentPipe

        return ZmqParentPipe()

    def reopen(self, addresses: tuple[str, str]) -> ParentPipe:
        """As Pipes.reopen."""
        from eventlm.system.parent_pipe import ZmqParentPipe

        return ZmqParentPipe(addresses)

    def open_child(self, inbox: str, outbox: str, ends: RemoteEnds | None = None) -> ChildPipe:
        """As Pipes.open_child."""
        from eventlm.system.child_pipe import ZmqChildPipe

        return ZmqChildPipe(inbox, outbox, ends)

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """As Pipes.pair."""
        import socket

        return socket.socketpair()
