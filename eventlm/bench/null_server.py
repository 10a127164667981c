"""A server that does next to nothing: it streams canned chunks as fast as they are read.

    python -m eventlm.bench.null_server

prints its port, and ends when its standard input does. What a client gets from it is the client's own ceiling.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys

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


def _canned(*, chat: bool) -> tuple[bytes, bytes]:
    """One token's event, and the end of a stream."""
    end = _event(chat=chat, text="", finish_reason="length") + _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return _event(chat=chat, text=" word", finish_reason=None), end


_CANNED = {chat: _canned(chat=chat) for chat in (True, False)}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request of a connection by `max_tokens` events."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _CONTENT_LENGTH.search(head)
            body = msgspec.json.decode(await reader.readexactly(int(length[1]) if length else 0))
            token, end = _CANNED[b"/chat/" in head.partition(b"\r\n")[0]]
            writer.write(_HEAD)
            left = int(body.get("max_tokens", 1))
            while left >= _EVENTS_A_WRITE:
                writer.write(token * _EVENTS_A_WRITE)
                left -= _EVENTS_A_WRITE
                await writer.drain()
                # Let the other connections run.
                await asyncio.sleep(0)
            writer.write(token * left + end)
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve())
