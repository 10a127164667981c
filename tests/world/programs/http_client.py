"""A client that sends one HTTP request over its own connection, and reads the reply as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from tests.world.machine.network import Address, Socket, SocketTransport
from tests.world.machine.process import Process

#: How many bytes a host buffers for a client that reads slowly.
_SLOW_WINDOW_BYTES = 2048


class SentEvent(NamedTuple):
    """An event of a stream. id: empty if it has none. data: None for the mark that ends the stream."""

    id: str
    data: dict[str, Any] | None


def _decoded(data: bytes) -> dict[str, Any] | None:
    return None if data == b"[DONE]" else msgspec.json.decode(data)


class Reply:
    """The part of a reply that has arrived. status: 0 until the head has arrived. error: why the connection ended
    early. last_ns: when its client last read something before it paused.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_whole = False
        self.error: Exception | None = None
        self.was_cut = False
        self.has_paused = False
        self.last_ns = 0
        self.socket: Socket | None = None
        #: Called whenever something arrives.
        self.on_data: Callable[[], None] | None = None

    def sent(self) -> list[SentEvent]:
        """The complete events of a stream."""
        events = bytes(self.body).split(b"\n\n")[:-1]
        fields = [dict(line.split(b": ", 1) for line in event.split(b"\n")) for event in events]
        return [SentEvent(each.get(b"id", b"").decode(), _decoded(each[b"data"])) for each in fields]

    def cut(self) -> None:
        """Break its connection, which both sides notice."""
        assert self.socket is not None
        self.was_cut = True
        self.socket.abort()
        self.socket.end(resets=True)

    def pause(self, seconds: float) -> None:
        """Read nothing for this long. Meanwhile the host buffers little."""
        assert self.socket is not None
        assert self.socket.transport is not None
        self.has_paused = True
        self.socket.window_bytes = _SLOW_WINDOW_BYTES
        self.socket.transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, self.socket.transport.resume_reading)

    @property
    def is_under_way(self) -> bool:
        """Whether more may arrive over its connection."""
        return self.socket is not None and not self.is_whole and self.error is None

    @property
    def server(self) -> Process | None:
        """The process that sends it."""
        peer = None if self.socket is None else self.socket.peer
        return None if peer is None else peer.holder

    @property
    def was_orphaned(self) -> bool:
        """Whether the process that sent it died before the end."""
        peer = None if self.socket is None else self.socket.peer
        return not self.is_whole and peer is not None and peer.was_orphaned

    @property
    def is_done(self) -> bool:
        """Whether the mark that ends a stream has arrived."""
        return b"data: [DONE]" in self.body


class _Connection(asyncio.Protocol):
    """Reads one reply."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._received = bytearray()
        self._left: int | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._reply.status or self._read_head():
            if self._left is None:
                self._read_chunks()
            else:
                self._read_rest(self._left)
        if self._reply.on_data is not None:
            self._reply.on_data()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._reply.is_whole:
            self._reply.error = exc or ConnectionError("the connection was closed")
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_head(self) -> bool:
        head, found, rest = bytes(self._received).partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.decode().split("\r\n")
        self._reply.status = int(first.split()[1])
        self._reply.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self._received = bytearray(rest)
        length = self._reply.headers.get("content-length")
        self._left = None if length is None else int(length)
        return True

    def _read_rest(self, length: int) -> None:
        self._reply.body += self._received
        self._received.clear()
        if len(self._reply.body) >= length:
            self._reply.is_whole = True
            self._end()

    def _read_chunks(self) -> None:
        while not self._reply.is_whole:
            size, found, rest = bytes(self._received).partition(b"\r\n")
            if not found or len(rest) < int(size, 16) + 2:
                return
            num_bytes = int(size, 16)
            self._reply.body += rest[:num_bytes]
            self._received = bytearray(rest[num_bytes + 2 :])
            if not num_bytes:
                self._reply.is_whole = True
                self._end()


async def send(
    process: Process,
    address: Address,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    *,
    reply: Reply | None = None,
) -> Reply:
    """Send a request, and read the reply to its end. reply: filled as data arrives, so that others can look at it."""
    reply = reply or Reply()
    data = b"" if body is None else msgspec.json.encode(body)
    lines = [f"{method} {path} HTTP/1.1", "host: server", f"content-length: {len(data)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in ({"content-type": "application/json"} | (headers or {})).items()]
    try:
        transport, connection = await process.loop.create_connection(lambda: _Connection(reply), *address)
    except OSError as error:
        reply.error = error
        return reply
    reply.socket = transport.get_extra_info("socket")
    cast(SocketTransport, transport).write("\r\n".join([*lines, "", ""]).encode() + data)
    try:
        await connection.ended
    finally:
        transport.close()
    return reply
