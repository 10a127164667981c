"""The child's end of a message pipe, over ZeroMQ. It imports no asyncio."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import zmq

from eventlm.system.remote_ends import RemoteEnds

#: How long a process that ends tries to get rid of what it has sent.
LINGER_MS = 1000
#: How often a process tries to reach its parent.
RECONNECT_MS = 10
#: How often a process looks for a message where it waits for less than ZeroMQ counts in.
_POLL_NS = 50_000
_MS_NS = 1_000_000


class ZmqSender:
    """As `Sender`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: bytes) -> None:
        """As Sender.send."""
        self._socket.send(message)

    def close(self) -> None:
        """As Sender.close."""
        self._socket.close()


class ZmqPulses:
    """As `Pulses`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    async def receive(self, timeout_seconds: float) -> bytes | None:
        """As Pulses.receive."""
        return self._socket.recv() if self._socket.poll(round(timeout_seconds * 1000)) else None

    def close(self) -> None:
        """As Pulses.close."""
        self._socket.close()


class ZmqChildPipe:
    """As `ChildPipe`, opened with the two addresses of a ParentPipe, and with `ends` where that is on another host."""

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

    async def wait(self, seconds: float) -> bool:
        """As ChildPipe.wait."""
        left_ns = round(seconds * 1e9)
        end_ns = time.monotonic_ns() + left_ns
        while not self._inbox.poll(max(left_ns, 0) // _MS_NS):
            left_ns = end_ns - time.monotonic_ns()
            if 0 < left_ns < _MS_NS:
                time.sleep(min(left_ns, _POLL_NS) / 1e9)  # noqa: ASYNC251
            if left_ns <= _POLL_NS:
                return False
        return True

    async def receive(self) -> list[bytes]:
        """As ChildPipe.receive."""
        return self._inbox.recv_multipart()

    def sender(self) -> ZmqSender:
        """As ChildPipe.sender."""
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, LINGER_MS)
        # Another parent may take the place of the first.
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if self._ends is not None:
            self._ends.protect(socket)
        socket.connect(self._addresses[1])
        return ZmqSender(socket)

    def pulses(self) -> ZmqPulses | None:
        """As ChildPipe.pulses."""
        if self._ends is None:
            return None
        socket = self._context.socket(zmq.PULL)
        self._ends.protect(socket)
        socket.connect(self._ends.pulses)
        return ZmqPulses(socket)

    def close(self) -> None:
        """As ChildPipe.close."""
        self._inbox.close()
        self._context.term()

    def remove(self) -> None:
        """As ChildPipe.remove: its files, if it has some."""
        if self._ends is not None:
            return
        paths = [Path(address.removeprefix("ipc://")) for address in self._addresses]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            paths[0].parent.rmdir()
