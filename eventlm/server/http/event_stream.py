"""A streamed reply over HTTP, with a bound on the data that waits for a slow client.

The bound (`max_stream_buffer`) holds for the process's buffer and, where supported, for unsent data in the kernel.
Above it the writer waits and joins further outputs into fewer events. The connection limits that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_writer import StreamWriter

from eventlm.config import ServerConfig
from eventlm.config.structs import memory_bytes
from eventlm.server.reply_format import SERVER_SENT_EVENTS

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streamed reply: `start`, `write` and `end`, which raise ConnectionError when the client is gone.

    max_waiting_bytes: the bound, if it is not the configured one.
    """

    def __init__(
        self, request: web.Request, config: ServerConfig, media_type: str, *, max_waiting_bytes: int | None = None
    ) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": f"{media_type}; charset=utf-8", **_HEADERS})
        self.request = request
        self._max_waiting_bytes = max_waiting_bytes or memory_bytes(config.max_stream_buffer)
        self._writer: StreamWriter | None = None

    @property
    def is_started(self) -> bool:
        """Whether the status of the reply was sent."""
        return self._writer is not None

    async def start(self, data: bytes = b"") -> None:
        """Begin the reply; its head leaves with the first bytes, if there are any."""
        transport = self._transport()
        transport.set_write_buffer_limits(high=self._max_waiting_bytes)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._max_waiting_bytes)
        if self.request.version < HttpVersion11:
            # It has no chunked encoding: the end of the connection marks the end of the stream.
            self.response.force_close()
        writer = await self.response.prepare(self.request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        if data:
            await writer.write(data, drain=False)
        else:
            writer.send_headers()

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait if the buffer is full."""
        self.send(data)
        if self.is_full:
            await self.drain()

    def send(self, data: bytes) -> None:
        """Send bytes without waiting."""
        assert self._writer is not None
        self._send(self._writer, data)

    def comment(self, text: str) -> None:
        """Send a comment, which clients ignore, if it is a stream of events that goes on and has room."""
        # Without an empty line: OpenAI's client takes one for an event.
        is_open = self.is_started and not self.is_full and self.response.content_type == SERVER_SENT_EVENTS
        with contextlib.suppress(ConnectionError):
            if is_open:
                self.send(f": {text}\n".encode())

    @property
    def is_full(self) -> bool:
        """Whether the writer should `drain` before it sends more."""
        return self._writer is not None and self._writer.protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the buffer has room."""
        assert self._writer is not None
        await self._writer.drain()

    def _send(self, writer: StreamWriter, data: bytes) -> None:
        """Like the writer's method, without waiting, since this runs for each token."""
        transport = writer.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if writer.chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)
        writer.output_size += len(data)

    async def end(self, data: bytes) -> None:
        """Send the last bytes, and wait until the kernel has taken all."""
        self._transport().set_write_buffer_limits(high=0)
        await self.response.write_eof(data)

    def _transport(self) -> asyncio.Transport:
        transport = self.request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        return transport
