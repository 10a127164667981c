"""Sockets that one process passes to another over a socket pair, each with a number. Nothing is named on the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

_NUMBER_BYTES = 4


class PassedSockets:
    """One end of a pair for passing sockets. The other end may be in any process, also one that has yet to be started.

    on_socket: gets each socket that arrives, and its number. on_lost: called once when the other end is closed.
    """

    def __init__(
        self,
        end: socket.socket,
        on_socket: Callable[[int, socket.socket], None],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._end = end
        self._on_socket = on_socket
        self._on_lost = on_lost
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end, self._receive)

    def send(self, number: int, passed: socket.socket) -> None:
        """Pass a socket on, and close it here. If the other end is closed, so is what this one was connected to."""
        with passed, contextlib.suppress(OSError):
            socket.send_fds(self._end, [number.to_bytes(_NUMBER_BYTES)], [passed.fileno()])

    def close(self) -> None:
        """Pass nothing more. Harmless when called twice."""
        if self._end.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._end)
            self._end.close()

    def _receive(self) -> None:
        # The kernel never joins messages that carry sockets.
        try:
            number, descriptors, _, _ = socket.recv_fds(self._end, _NUMBER_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            number, descriptors = b"", []
        if not number:
            self.close()
            self._on_lost()
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._on_socket(int.from_bytes(number), socket.socket(fileno=descriptor))
