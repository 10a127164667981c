"""The parent's end of a message pipe to a child process, over ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from eventlm.system.left_process import remove_pipe

#: Raised by a pipe that cannot be opened or read.
PipeError = zmq.ZMQError


class ZmqParentPipe:
    """As `ParentPipe`. addresses: of the pipe to a child whose parent has died.

    The child binds its inbox: a socket that connects takes messages before there is a peer, while one that is bound
    would block until then, for ever if the child dies first.
    """

    def __init__(self, addresses: tuple[str, str] | None = None) -> None:
        with contextlib.ExitStack() as stack:
            self._to_child: zmq.Socket[bytes] = stack.enter_context(zmq.Context.instance().socket(zmq.PUSH))
            self._from_child = stack.enter_context(zmq.asyncio.Context.instance().socket(zmq.PULL))
            if addresses is None:
                # Mode 0700, so that no other user can reach the sockets in it.
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventlm-")))
                addresses = (f"ipc://{folder / 'in'}", f"ipc://{folder / 'out'}")
            else:
                stack.callback(remove_pipe, addresses)
            self.addresses = addresses
            for end in (self._to_child, self._from_child):
                end.set(zmq.LINGER, 0)
                end.set_hwm(0)
            self._to_child.set(zmq.RECONNECT_IVL, 10)
            self._to_child.connect(self.addresses[0])
            self._from_child.bind(self.addresses[1])
            self._stack = stack.pop_all()

    def send(self, *frames: bytes) -> None:
        """As ParentPipe.send."""
        with contextlib.suppress(zmq.Again):
            self._to_child.send_multipart(frames, flags=zmq.NOBLOCK)

    def pulse(self, message: bytes) -> None:
        """As ParentPipe.pulse: a child of this host sees by itself whether its parent lives."""

    def receive(self) -> asyncio.Future[bytes]:
        """As ParentPipe.receive."""
        return asyncio.ensure_future(self._from_child.recv())

    def close(self) -> None:
        """As ParentPipe.close."""
        self._stack.close()
