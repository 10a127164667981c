"""`eventlm serve --resume-seconds`: connections that break at every stage, and what is left of them; and requests that
are sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
import struct
from typing import Any

import openai
import pytest

from eventlm.events import Arrived, Cancelled
from tests.cli.conftest import StartServer
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.serving import Server, fake_text

NUM_STREAMS = 60
ANN, BOB = "ann-0123456789abcdef0123456789abcdef", "bob-0123456789abcdef0123456789abcdef"
KEYS = "".join(
    f'[[keys]]\nname = "{key[:3]}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n' for key in (ANN, BOB)
)


class Client:
    """One stream over as many connections as it takes. `events` are those that were complete."""

    def __init__(self, server: Server, number: int) -> None:
        self._address = server.url.removeprefix("http://").split(":")
        self._draw = random.Random(number)
        self.seed, self.n = number, self._draw.choice([1, 1, 2])
        self.max_tokens = self._draw.randint(1, 120)
        self.leaves = self._draw.random() < 0.2
        self.events: list[tuple[str, Any]] = []
        fields = {"model": server.model, "prompt": "hi", "seed": self.seed, "n": self.n, "ignore_eos": True}
        # No text has it, so the end of each is known when it has been looked at.
        stop = self._draw.choice([{}, {"stop": ["nowhere to be found"]}])
        self._body = json.dumps({**fields, **stop, "max_tokens": self.max_tokens, "stream": True}).encode()

    async def run(self) -> None:
        await self._read("POST /v1/completions", self._body, max(0, self._draw.randint(-500, 3000)))
        for _ in range(100):
            if self.is_whole or not self.events or self.leaves:
                return
            event_id, chunk = self.events[-1]
            request = f"GET /v1/stream/{chunk['id']}"
            how = self._draw.random() < 0.5
            head = f"{request}?from={event_id}" if how else request
            most = self._draw.choice([400, 3000, 100_000]) + self._draw.randrange(1000)
            await self._read(head, b"", most, event_id="" if how else event_id)

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and self.events[-1][1] == "[DONE]"

    async def _read(self, request: str, body: bytes, most: int, *, event_id: str = "") -> None:
        """Send a request, and leave after so many bytes of its reply."""
        reader, writer = await asyncio.open_connection(*self._address)
        head = f"{request} HTTP/1.0\r\nAuthorization: Bearer {ANN}\r\nContent-Type: application/json\r\n"
        head += f"Last-Event-ID: {event_id}\r\n" if event_id else ""
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        data = b""
        while len(data) < most and (received := await reader.read(most - len(data))):
            data += received
        if self._draw.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        status, _, rest = data.partition(b"\r\n")
        assert not rest or b" 200 " in status, data
        for event in data.partition(b"\r\n\r\n")[2].split(b"\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
            payload = fields["data"]
            self.events.append((fields["id"], payload if payload == "[DONE]" else json.loads(payload)))

    def text(self, choice: int) -> str:
        parts = [each for _, chunk in self.events[:-1] for each in chunk["choices"] if each["index"] == choice]
        return "".join(part["text"] for part in parts)


@pytest.mark.parametrize("num_front_ends", [pytest.param(0, marks=pytest.mark.soak), 2])
async def test_streams_that_break_at_every_stage(start_server: StartServer, num_front_ends: int) -> None:
    server = start_server(
        *("--model", "fake", "--fake", "base_ns=2000000", "--resume-seconds", "60", "--api-keys-file", "keys.toml"),
        *("--api-servers", str(num_front_ends)),
        files={"keys.toml": KEYS},
    )
    clients = [Client(server, number) for number in range(NUM_STREAMS)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(client.run() for client in clients))
    whole = [client for client in clients if client.is_whole]
    for client in whole:
        texts = [client.text(choice) for choice in range(client.n)]
        assert texts == [fake_text(client.seed, client.max_tokens, index=index) for index in range(client.n)]
    assert len(whole) > NUM_STREAMS / 3
    assert all(client.is_whole for client in clients if client.events and not client.leaves)
    # Those to which nobody comes back have ended too.
    wait_until(lambda: server.figure("vllm:num_requests_running") == 0)
    assert server.figure("vllm:num_requests_waiting") == 0
    assert server.figure("vllm:kv_cache_usage_perc") == 0
    check_keys(server)
    trace = server.stop_and_verify()
    assert sum(trace.finish_reasons.values()) >= sum(client.n for client in whole)


def check_keys(server: Server) -> None:
    """A stream is its own key's only."""
    headers = {"Authorization": f"Bearer {ANN}", "Content-Type": "application/json"}
    body = json.dumps({"model": server.model, "prompt": "hi", "max_tokens": 5, "stream": True}).encode()
    stream = server.request("POST", "/v1/completions", body, headers).data
    reply_id = json.loads(stream.split(b"data: ")[1].partition(b"\n")[0])["id"]
    statuses = {
        key: server.request("GET", f"/v1/stream/{reply_id}", headers={"Authorization": f"Bearer {key}"}).status
        for key in (BOB, "none", ANN)
    }
    assert statuses == {BOB: 404, "none": 401, ANN: 200}
    unknown = server.request("GET", "/v1/stream/cmpl-0", headers={"Authorization": f"Bearer {BOB}"})
    hidden = server.request("GET", f"/v1/stream/{reply_id}", headers={"Authorization": f"Bearer {BOB}"})
    assert hidden.data.replace(reply_id.encode(), b"") == unknown.data.replace(b"cmpl-0", b"")
    cancelled = server.request("DELETE", f"/v1/stream/{reply_id}", headers={"Authorization": f"Bearer {BOB}"})
    assert cancelled.status == 404


async def test_requests_with_the_same_key_run_once_whichever_front_end_gets_them(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", "base_ns=20000000", "--api-servers", "2")
    fields: dict[str, Any] = {"model": server.model, "prompt": "hi", "seed": 5, "n": 2, "max_tokens": 20}
    key = {"extra_headers": {"Idempotency-Key": "whole"}}

    async def complete(number: int) -> openai.types.Completion:
        # A client of its own, since the front end is chosen for each connection; every other one loses patience.
        async with server.async_client(timeout=(0.2, PATIENCE_SECONDS)[number % 2], max_retries=20) as client:
            return await client.completions.create(**fields, extra_body={"ignore_eos": True}, **key)

    async def stream() -> list[openai.types.Completion]:
        async with server.async_client() as client:
            key = {"extra_headers": {"Idempotency-Key": "streamed"}}
            return [chunk async for chunk in await client.completions.create(**fields, stream=True, **key)]

    async with asyncio.timeout(PATIENCE_SECONDS):
        whole = await asyncio.gather(*(complete(number) for number in range(12)))
        streams = await asyncio.gather(*(stream() for _ in range(12)))
        async with server.async_client() as client:
            with pytest.raises(openai.UnprocessableEntityError):
                await client.completions.create(**fields, **key)
    assert [choice.text for choice in whole[0].choices] == [fake_text(5, 20, index=index) for index in range(2)]
    assert all(each == whole[0] for each in whole)
    assert all(each == streams[0] for each in streams)
    trace = server.stop_and_verify()
    assert [event.n for event in trace.of(Arrived)] == [2, 2]
    assert trace.of(Cancelled) == []
