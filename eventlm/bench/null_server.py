"""A server that costs as little as it can: it streams canned chunks as fast as they are read.

    python -m eventlm.bench.null_server

prints its port, and ends when its standard input does. What a client gets from it is the client's own ceiling.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import msgspec
import uvloop

#: Events in one write: a busy server's tokens come one by one, but a client at its ceiling finds several at once.
_EVENTS_A_WRITE = 32
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"^content-length:\s*(\d+)", re.IGNORECASE | re.MULTILINE)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(*, chat: bool, text: str, finish_reason: str | None) -> bytes:
    """An event of the size and shape that vLLM and eventlm send."""
    part = {"delta": {"content": text}} if chat else {"text": text}
    body = {
        "id": "cmpl-00000000000000000000000000000000",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1700000000,
        "model": "null",
        "choices": [{"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}],
        "usage": None,
    }
    return _chunked(b"data: " + msgspec.json.encode(body) + b"\n\n")


class _Canned:
    """One endpoint's events."""

    def __init__(self, *, chat: bool) -> None:
        self.token = _event(chat=chat, text=" word", finish_reason=None)
        self.block = self.token * _EVENTS_A_WRITE
        self.end = _event(chat=chat, text="", finish_reason="length") + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection: a request is answered by `max_tokens` events, then the next may come."""

    canned = {True: _Canned(chat=True), False: _Canned(chat=False)}

    def __init__(self) -> None:
        self._received = b""
        self._left = 0
        self._paused = False
        self._answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._paused = True

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._answering:
            self._write()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        found = _CONTENT_LENGTH.search(head)
        length = int(found[1]) if found else 0
        if not separator or len(rest) < length:
            return
        self._received = rest[length:]
        self._chat = b"/chat/" in head.partition(b"\r\n")[0]
        self._left = int(msgspec.json.decode(rest[:length]).get("max_tokens", 1))
        self._answering = True
        self._transport.write(_HEAD)
        self._write()

    def _write(self) -> None:
        """Write a block and let the other connections have their turn."""
        canned = self.canned[self._chat]
        if self._paused:
            return
        if self._left >= _EVENTS_A_WRITE:
            self._left -= _EVENTS_A_WRITE
            self._transport.write(canned.block)
        else:
            self._transport.write(canned.token * self._left + canned.end)
            self._left, self._answering = 0, False
            return
        asyncio.get_running_loop().call_soon(self._write)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
