"""A backend that costs next to nothing: it looks like vLLM and streams the same tokens to everybody.

    python -m benchmarks.gateway.backend [--ports 1] [--tokens 64] [--first-ms 20] [--token-ms 50]

It prints the address of each port in a line of its own, and runs until it is ended. Every token is an event in a chunk
of its own; with --token-ms 0 they come as fast as they are read.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import uvloop

#: In the text of each token, and nowhere else in a stream.
TOKEN_MARK = b"~"
#: The last bytes of a stream.
STREAM_END = b"\r\n0\r\n\r\n"
MODEL = "stub"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_CONTENT_LENGTH = re.compile(rb"^content-length:\s*(\d+)", re.IGNORECASE | re.MULTILINE)
_METRICS = b"vllm:num_requests_running %d.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL, "max_model_len": 4096}]}


class Answer(NamedTuple):
    """What is streamed, and when: tokens, each as it is sent, and what comes behind the last one."""

    tokens: list[bytes]
    end: bytes
    first_seconds: float
    token_seconds: float


def make_answer(num_tokens: int, first_seconds: float, token_seconds: float) -> Answer:
    """An answer of so many tokens, of the form and size of vLLM's."""
    tokens = [_event([_choice({"content": f" {TOKEN_MARK.decode()}{i:04}"})], i + 1) for i in range(num_tokens)]
    end = _event([_choice({}, "length")], num_tokens) + _event([], num_tokens) + _chunked(b"data: [DONE]\n\n")
    tokens[0] = _event([_choice({"role": "assistant", "content": ""})], 0) + tokens[0]
    return Answer(tokens, end + STREAM_END[2:], first_seconds, token_seconds)


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}


def _event(choices: list[dict[str, Any]], num_tokens: int) -> bytes:
    body = {
        "id": "chatcmpl-00000000000000000000000000000000",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": 16, "total_tokens": 16 + num_tokens, "completion_tokens": num_tokens},
    }
    return _chunked(b"data: " + msgspec.json.encode(body) + b"\n\n")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Port:
    """One backend. num_running: streams under way."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_running = 0

    def page(self, path: bytes) -> bytes:
        """A reply to a GET."""
        if path == b"/metrics":
            return _page(200, _METRICS % self.num_running)
        found = {b"/version": {"version": "0.99.0"}, b"/health": {}, b"/v1/models": _MODELS}.get(path)
        return _page(404, b"{}") if found is None else _page(200, msgspec.json.encode(found))


def _page(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d .\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


class Connection(asyncio.Protocol):
    """A client's connection, with one request after the other."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._position = 0
        self._is_paused = False
        self._timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol."""
        self._stop()

    def pause_writing(self) -> None:
        """As asyncio.Protocol."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """As asyncio.Protocol."""
        self._is_paused = False
        if self._timer is None and self._position:
            self._write()

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = _CONTENT_LENGTH.search(head)
        if not found or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._transport.write(self._port.page(path))
            return
        self._port.num_running += 1
        self._transport.write(_HEAD)
        self._position = 0
        self._timer = self._loop.call_later(self._port.answer.first_seconds, self._write)

    def _write(self) -> None:
        """Send the next token."""
        self._timer = None
        answer = self._port.answer
        self._transport.write(answer.tokens[self._position])
        self._position += 1
        if self._position == len(answer.tokens):
            self._transport.write(answer.end)
            self._stop()
        elif answer.token_seconds:
            self._timer = self._loop.call_later(answer.token_seconds, self._write)
        elif not self._is_paused:
            self._timer = self._loop.call_soon(self._write)

    def _stop(self) -> None:
        if self._position or self._timer is not None:
            self._port.num_running -= 1
        self._position = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _serve(answer: Answer, num_ports: int) -> None:
    loop = asyncio.get_running_loop()
    servers = []
    for _ in range(num_ports):
        servers.append(await loop.create_server(partial(Connection, Port(answer)), "127.0.0.1", 0, backlog=4096))
    print("\n".join(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--token-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    answer = make_answer(arguments.tokens, arguments.first_ms / 1000, arguments.token_ms / 1000)
    uvloop.run(_serve(answer, arguments.ports))


if __name__ == "__main__":
    main()
