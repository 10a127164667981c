"""Length-prefixed messages over a stream socket: four bytes, big-endian, then the message."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

_LENGTH_BYTES = 4


class FrameConnection(asyncio.Protocol):
    """One end of a connection. `on_frame` takes each message; `on_lost` is called once when the other end closes.

    Neither is called after `on_lost` or `abort`. Unread messages stay in memory, so senders must watch `backlog_bytes`.
    """

    def __init__(self, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._is_open = True
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, end: socket.socket, on_frame: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> FrameConnection:
        """Connect over one end of a socket pair. Closing the connection closes it."""
        connection = cls(on_frame, on_lost)
        await connection.connect(end)
        return connection

    async def connect(self, end: socket.socket) -> None:
        """As `open`. Messages may arrive, and others may be sent, before this returns."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def backlog_bytes(self) -> int:
        """Bytes sent that have not left this process."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, body: bytes) -> None:
        """Send a message. It is dropped if the connection is lost, which is reported elsewhere."""
        if self._transport is not None and self._is_open:
            self._transport.writelines((len(body).to_bytes(_LENGTH_BYTES), body))

    async def close(self) -> None:
        """Close after everything sent has left, and wait for that. Does not call `on_lost`."""
        self._is_open = False
        if self._transport is not None:
            self._transport.close()
            await self._closed

    def abort(self) -> None:
        """Close at once. Does not call `on_lost`."""
        self._is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not its subclasses.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received, taken = self._received, 0
        received += data
        while self._is_open and len(received) - taken >= _LENGTH_BYTES:
            start = taken + _LENGTH_BYTES
            end = start + int.from_bytes(received[taken:start])
            if len(received) < end:
                break
            self._on_frame(bytes(received[start:end]))
            taken = end
        del received[:taken]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        if self._is_open:
            self._is_open = False
            self._on_lost()
