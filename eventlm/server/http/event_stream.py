"""The HTTP side of server-sent events: what waits for a client that reads slowly has a bound.

The bound holds for what the process keeps for the connection (`max_stream_buffer`) and, where the system can, for what
the kernel keeps unsent beside it. Over it the writer waits, and what comes meanwhile is joined into fewer events by
whoever writes. For how long it waits is the connection's affair.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.http_writer import StreamWriter

from eventlm.config import ServerConfig
from eventlm.config.sizes import memory_bytes

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream:
    """One streamed reply: `start`, `write` and `end`. They raise ConnectionError when the client is gone."""

    def __init__(self, request: web.Request, config: ServerConfig) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._max_waiting_bytes = memory_bytes(config.max_stream_buffer)
        self._writer: StreamWriter | None = None

    @property
    def is_started(self) -> bool:
        """Whether the client has been sent the status of its reply."""
        return self._writer is not None

    async def start(self) -> None:
        """Begin the reply."""
        transport = self._transport()
        transport.set_write_buffer_limits(high=self._max_waiting_bytes)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._max_waiting_bytes)
        if self._request.version < HttpVersion11:
            # It knows no chunks: where a stream ends is told by the end of the connection alone.
            self.response.force_close()
        writer = await self.response.prepare(self._request)
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        writer.send_headers()

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait if too many wait already."""
        self.send(data)
        if self.is_full:
            await self.drain()

    def send(self, data: bytes) -> None:
        """Send bytes without waiting."""
        assert self._writer is not None
        self._send(self._writer, data)

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the client that nothing more should be sent before `drain`."""
        return self._writer is not None and self._writer.protocol.writing_paused

    async def drain(self) -> None:
        """Wait until the client has taken enough."""
        assert self._writer is not None
        await self._writer.drain()

    def _send(self, writer: StreamWriter, data: bytes) -> None:
        """As the writer does it, but at once: this is done for each token."""
        transport = writer.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if writer.chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        transport.write(data)
        writer.output_size += len(data)

    async def end(self, data: bytes) -> None:
        """Send the last bytes, and wait until the kernel has all of them."""
        assert self._writer is not None
        transport = self._transport()
        transport.set_write_buffer_limits(high=0)
        self._send(self._writer, data)
        self._writer.set_eof()
        await self._writer.drain()
        await self.response.write_eof()

    def _transport(self) -> asyncio.Transport:
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        return transport
