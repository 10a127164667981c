"""A client that costs next to nothing: so many streams at once, of which it counts tokens and takes the first's time.

    python -m benchmarks.gateway.streams URL --streams 256 --requests 1024 --tokens 64 [--ramp-ms 3000]

Each stream has a connection of its own, on which it sends its requests one after the other; the streams begin spread
over --ramp-ms. It prints one line of JSON, a `Streamed`. Every answer must have --tokens tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.gateway.backend import MODEL, STREAM_END, TOKEN_MARK

PATIENCE_SECONDS = 300.0


class Streamed(Struct, frozen=True):
    """What a load showed. seconds: from the first request to the last end. cpu_seconds: of this process meanwhile.
    ttft_ms: of each request, in the order of the first tokens. failures: what some answers were in place of a stream.
    """

    num_tokens: int
    seconds: float
    cpu_seconds: float
    ttft_ms: list[float]
    failures: list[str]


class Load:
    """The requests of all streams and what came of them."""

    def __init__(self, host: str, num_requests: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.ttft_ms: list[float] = []
        self.failures: list[str] = []
        self._bodies = self._requests(host, num_requests)
        self._left = num_requests
        self.is_over = asyncio.Event()

    def next_request(self) -> bytes | None:
        """The next one to send; None if there is none."""
        return next(self._bodies, None)

    def end(self, failure: str = "") -> None:
        """A request is over."""
        if failure:
            self.failures.append(failure)
        self._left -= 1
        if not self._left:
            self.is_over.set()

    def _requests(self, host: str, num_requests: int) -> Iterator[bytes]:
        for number in range(num_requests):
            messages = [{"role": "user", "content": f"Question {number:06}: why is the sky blue, and not green?"}]
            body = msgspec.json.encode(
                {"model": MODEL, "messages": messages, "stream": True, "max_completion_tokens": self.num_tokens}
            )
            yield (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (host.encode(), len(body), body)
            )


class Stream(asyncio.Protocol):
    """One connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._is_under_way = False
        self._began = 0.0
        self._num_tokens = 0
        #: The end of what has come of an answer.
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol."""
        if self._is_under_way:
            self._load.end("the connection was closed")

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._end(data.decode(errors="replace"))
            self._transport.close()
            return
        num_tokens = data.count(TOKEN_MARK)
        if num_tokens and not self._num_tokens:
            self._load.ttft_ms.append((time.perf_counter() - self._began) * 1000)
        self._num_tokens += num_tokens
        self._tail = (self._tail + data)[-len(STREAM_END) :]
        if self._tail == STREAM_END:
            wanted = self._load.num_tokens
            self._end("" if self._num_tokens == wanted else f"{self._num_tokens} tokens, not {wanted}")
            self._send()

    def _end(self, failure: str) -> None:
        self._is_under_way = False
        self._load.end(failure)

    def _send(self) -> None:
        request = self._load.next_request()
        if request is None:
            self._transport.close()
            return
        self._is_under_way = True
        self._num_tokens = 0
        self._tail = b""
        self._began = time.perf_counter()
        self._transport.write(request)


async def run(url: str, num_streams: int, num_requests: int, num_tokens: int, ramp_seconds: float) -> Streamed:
    """Put the load on and wait for its end. Raises TimeoutError if it has none."""
    host = urlsplit(url).netloc
    name, _, port = host.partition(":")
    load = Load(host, num_requests, num_tokens)
    loop = asyncio.get_running_loop()
    began, cpu_before = time.perf_counter(), time.process_time()
    async with asyncio.timeout(PATIENCE_SECONDS):
        for number in range(num_streams):
            await asyncio.sleep(began + ramp_seconds * number / num_streams - time.perf_counter())
            await loop.create_connection(lambda: Stream(load), name, int(port))
        await load.is_over.wait()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_before
    num_whole = num_requests - len(load.failures)
    return Streamed(num_whole * num_tokens, seconds, cpu_seconds, load.ttft_ms, load.failures)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    for name in ("streams", "requests", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ramp-ms", type=float, default=0.0)
    given = parser.parse_args()
    found = uvloop.run(run(given.url, given.streams, given.requests, given.tokens, given.ramp_ms / 1000))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
