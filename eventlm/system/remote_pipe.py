"""A message pipe to a process on another host: ZeroMQ over TCP, encrypted, with keys that only this run has.

The parent listens, so that only its host need be reachable. A handshake begins with a box that is sealed for the run's
public key, which is given to the run's own children and to nobody else: who lacks it gets nowhere, and a child that has
it knows that it speaks with the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

import zmq
import zmq.asyncio

from eventlm.system.remote_ends import RemoteEnds

#: How often the parent tries to send to a child that is not connected.
RETRY_SECONDS = 0.02


class RunKeys:
    """The keys of one run. Those of the parent and of all its children."""

    def __init__(self) -> None:
        self.public, self.secret = zmq.curve_keypair()
        self.child_public, self.child_secret = zmq.curve_keypair()


class RemoteParentPipe:
    """As `ParentPipe`. host: the address of this one by which the child's host reaches it. Raises PipeError."""

    def __init__(self, host: str, keys: RunKeys) -> None:
        with contextlib.ExitStack() as stack:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
            self._to_child: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.PUSH))
            self._pulses: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.PUSH))
            self._from_child = stack.enter_context(zmq.asyncio.Context.instance().socket(zmq.PULL))
            endpoints = []
            for end in (self._to_child, self._from_child, self._pulses):
                end.set(zmq.LINGER, 0)
                end.set_hwm(0)
                end.set(zmq.IPV6, 1)
                end.curve_server = True
                end.curve_secretkey = keys.secret
                end.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
                endpoints.append(end.get_string(zmq.LAST_ENDPOINT))
            self.addresses = (endpoints[0], endpoints[1])
            self.ends = RemoteEnds(endpoints[2], keys.public, keys.child_public, keys.child_secret)
            self._stack = stack.pop_all()
        #: What could not be sent yet: there is no queue for a child that has not connected.
        self._unsent: deque[tuple[bytes, ...]] = deque()
        self._is_closed = False

    def send(self, *frames: bytes) -> None:
        """As ParentPipe.send."""
        self._unsent.append(frames)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        if self._is_closed:
            return
        try:
            while self._unsent:
                self._to_child.send_multipart(self._unsent[0], flags=zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)

    def pulse(self, message: bytes) -> None:
        """As ParentPipe.pulse."""
        with contextlib.suppress(zmq.Again):
            self._pulses.send(message, flags=zmq.NOBLOCK)

    def receive(self) -> asyncio.Future[bytes]:
        """As ParentPipe.receive."""
        return asyncio.ensure_future(self._from_child.recv())

    def close(self) -> None:
        """As ParentPipe.close."""
        self._is_closed = True
        self._stack.close()
