"""Clients that mean no good, over raw sockets. Each returns what became of it: a status, `closed`, or `hung`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

CLOSED = "closed"
HUNG = "hung"
LEFT = "left"


class Target(NamedTuple):
    """Where the server is, its model, the length of a long reply, and when a client says that it hangs."""

    host: str
    port: int
    model: str
    max_tokens: int
    patience_seconds: float


#: One client: its number makes it a little different from the others.
Attack = Callable[[Target, int], Awaitable[str]]


def completion(target: Target, number: int = 0, **fields: object) -> bytes:
    """A whole request."""
    body = {"model": target.model, "prompt": f"hello {number}", "max_tokens": 8, **fields}
    return post("/v1/completions", json.dumps(body).encode())


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a JSON body."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


class Client:
    """A connection whose every wait has an end."""

    def __init__(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._target = target
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, target: Target, *, buffer_bytes: int = 1 << 16) -> Client:
        opening = asyncio.open_connection(target.host, target.port, limit=buffer_bytes)
        return cls(target, *await asyncio.wait_for(opening, target.patience_seconds))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await asyncio.wait_for(self._writer.drain(), self._target.patience_seconds)

    async def status(self) -> str:
        """Of the reply, or `closed`, or `hung`."""
        try:
            line = await asyncio.wait_for(self._reader.readline(), self._target.patience_seconds)
        except TimeoutError:
            return HUNG
        except ConnectionError:
            return CLOSED
        return line.split()[1].decode() if line.startswith(b"HTTP/") else CLOSED

    async def until_closed(self) -> str:
        """Read to the end; the status of the first reply, if there is any."""
        status = await self.status()
        try:
            while await asyncio.wait_for(self._reader.read(65536), self._target.patience_seconds):
                pass
        except TimeoutError:
            return HUNG
        except ConnectionError:
            pass
        return status

    async def first_bytes(self) -> bool:
        """Whether the reply has begun."""
        return await self.status() == "200"

    def leave(self) -> str:
        """Without a word."""
        self._writer.transport.abort()
        return LEFT


async def _trickle(client: Client, data: bytes) -> str:
    """A byte at a time, until the server has had enough."""
    reading = asyncio.create_task(client.until_closed())
    with contextlib.suppress(ConnectionError):
        for byte in data:
            if reading.done():
                break
            await client.send(bytes([byte]))
            await asyncio.wait({reading}, timeout=0.2)
    return await reading


async def idle(target: Target, number: int) -> str:
    """Connects, and says nothing until the server hangs up."""
    return await (await Client.connect(target)).until_closed()


async def slow_head(target: Target, number: int) -> str:
    """Sends the head of a request for ever."""
    client = await Client.connect(target)
    return await _trickle(client, b"GET /health HTTP/1.1\r\nHost: x\r\nx-pad: " + b"a" * 4000)


async def slow_body(target: Target, number: int) -> str:
    """Announces a body and sends it for ever."""
    client = await Client.connect(target)
    framing = "Content-Length: 100000" if number % 2 else "Transfer-Encoding: chunked"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
    await client.send(head.encode())
    return await _trickle(client, b"1\r\n \r\n" * 700)


async def slow_reader(target: Target, number: int) -> str:
    """Asks for a long stream and does not read it; leaves after a while if the server does not hang up."""
    client = await Client.connect(target, buffer_bytes=1024)
    await client.send(completion(target, number, stream=True, max_tokens=target.max_tokens))
    await client.first_bytes()
    await asyncio.sleep(2)
    return client.leave()


async def vanish(target: Target, number: int) -> str:
    """Leaves at one of the stages of a request, by its number."""
    client = await Client.connect(target)
    request = completion(target, number, stream=number % 2 == 0, max_tokens=target.max_tokens)
    head = request.index(b"\r\n\r\n") + 4
    stage = number % 7
    if stage == 0:
        return client.leave()
    await client.send(request[: {1: 10, 2: head - 2, 3: head, 4: head + 9}.get(stage, len(request))])
    if stage == 6 and number % 2 == 0:
        await client.first_bytes()
    elif stage >= 5:
        await asyncio.sleep(0.01 * (number % 5))
    return client.leave()


async def _send_and_read(target: Target, data: bytes) -> str:
    client = await Client.connect(target)
    with contextlib.suppress(ConnectionError):
        await client.send(data)
    status = await client.status()
    client.leave()
    return status


async def header_flood(target: Target, number: int) -> str:
    """More header than any server wants."""
    floods = [
        b"".join(b"x-%d: y\r\n" % index for index in range(3000)),
        b"x-long: " + b"a" * 500_000 + b"\r\n",
        b"cookie: " + b"a=b; " * 20_000 + b"\r\n",
    ]
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + floods[number % 3] + b"\r\n"
    return await _send_and_read(target, head)


async def bad_json(target: Target, number: int) -> str:
    """Bodies that are deep, huge or contradictory."""
    model = json.dumps(target.model).encode()
    bodies = [
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"model":' + model + b',"prompt":"x","max_tokens":' + b"9" * 100_000 + b"}",
        b'{"model":' + model + b',"prompt":"x","temperature":1e' + b"9" * 1000 + b"}",
        b'{"model":' + model + b',"prompt":"x","n":99999999999999999999}',
        b'{"model":' + model + b',"prompt":"x","seed":-1e400}',
        b'{"model":' + model + b',"prompt":[' + b"999999999999999999999," * 1000 + b"1]}",
        b'{"model":' + model + b',"prompt":"x","logit_bias":{"' + b"9" * 5000 + b'":1}}',
        b'{"model":' + model + b',"prompt":"\\ud800' + b"\\u0000" * 1000 + b'"}',
        b'{"model":' + model + b',"prompt":' + b'["' + b'x","' * 3000 + b'x"],"n":128}',
        b"\xff" * 10_000,
        b'{"model":' + model + b',"prompt":"x","stop":' + json.dumps(["s" * 9] * 5000).encode() + b"}",
    ]
    return await _send_and_read(target, post("/v1/completions", bodies[number % len(bodies)]))


async def not_http(target: Target, number: int) -> str:
    """TLS, another protocol's greeting, a request that smuggles a second one, a target that is none."""
    words = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"EHLO example.com\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 5000,
    ]
    return await _send_and_read(target, words[number % len(words)] + b"\r\n\r\n")


async def run_attack(attack: Attack, target: Target, number: int) -> Counter[str]:
    """So many clients at once; what became of each."""

    async def one(index: int) -> str:
        try:
            return await attack(target, index)
        except TimeoutError:
            return HUNG
        except OSError:
            return CLOSED

    return Counter(await asyncio.gather(*(one(index) for index in range(number))))


async def cancel_burst(target: Target, number: int) -> Counter[str]:
    """Many streams at once, all of which leave in the same moment."""

    async def start(index: int) -> tuple[Client | None, str]:
        try:
            client = await Client.connect(target)
            await client.send(completion(target, index, stream=True, max_tokens=target.max_tokens))
            return client, await client.status()
        except TimeoutError:
            return None, HUNG
        except OSError:
            return None, CLOSED

    started = await asyncio.gather(*(start(index) for index in range(number)))
    for client, _ in started:
        if client is not None:
            client.leave()
    return Counter(status for _, status in started)


#: By name.
ATTACKS: dict[str, Attack] = {
    "idle": idle,
    "slow head": slow_head,
    "slow body": slow_body,
    "slow reader": slow_reader,
    "vanish": vanish,
    "header flood": header_flood,
    "bad JSON": bad_json,
    "not HTTP": not_http,
}
