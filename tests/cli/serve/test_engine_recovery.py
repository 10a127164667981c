"""Engines that are killed under load: clients come back for their streams, and every text is exact."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventlm.events import Arrived, Recovered
from tests.keeper.kept_server import KeptServer
from tests.processes import PATIENCE_SECONDS, is_running, until, wait_until
from tests.serving import fake_text, verified

NUM_STREAMS, MAX_TOKENS = 8, 120
#: A few seconds for each stream.
FLAGS = ("--fake", "base_ns=20000000")


class Client:
    """Reads a stream, and comes back for the rest of it as often as its connection is lost."""

    def __init__(self, server: KeptServer, number: int) -> None:
        self._server = server
        self.seed = number
        # No text has it, but somebody must look.
        fields: dict[str, Any] = {"stop": ["nowhere to be found"]} if number % 2 else {}
        fields |= {"model": "fake", "prompt": "hi", "seed": number, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        self._body = json.dumps(fields | {"stream": True}).encode()
        self._id = ""
        self._event = ""
        self.text = ""
        self.finish_reason = ""
        self.num_connections = 0
        self._is_whole = False

    async def run(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self._is_whole:
                self.num_connections += 1
                try:
                    if not self._id:
                        await self._read("POST /v1/completions", self._body)
                    else:
                        await self._read(f"GET /v1/stream/{self._id}", b"", f"Last-Event-ID: {self._event}\r\n")
                except OSError:
                    await asyncio.sleep(0.05)

    async def _read(self, request: str, body: bytes, header: str = "") -> None:
        reader, writer = await asyncio.open_connection(*self._server.url.removeprefix("http://").split(":"))
        head = f"{request} HTTP/1.0\r\nContent-Type: application/json\r\n{header}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            status = int((await reader.readline()).split()[1] or b"0")
            assert status in (200, 503), status
            lines: list[bytes] = []
            while line := await reader.readline():
                lines.append(line.rstrip())
                if not line.strip() and status == 200:
                    self._take(lines)
                    lines = []
        except IndexError:
            # It was lost before it answered.
            await asyncio.sleep(0.05)
        finally:
            writer.close()

    def _take(self, lines: list[bytes]) -> None:
        """One whole event."""
        fields = dict(line.split(b": ", 1) for line in lines if b": " in line)
        data = fields.get(b"data", b"")
        if data == b"[DONE]":
            self._is_whole = True
        elif data:
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            self._id, self._event = chunk["id"], fields[b"id"].decode()
            self.text += "".join(choice["text"] for choice in chunk["choices"])
            for choice in chunk["choices"]:
                self.finish_reason = choice["finish_reason"] or self.finish_reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a server, under which others may not look."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def servers() -> Iterator[list[KeptServer]]:
    """Servers that end with their test."""
    started: list[KeptServer] = []
    yield started
    for server in started:
        engines = server.processes
        server.close()
        wait_until(lambda engines=engines: not any(map(is_running, engines)))


async def _started(clients: list[Client]) -> None:
    await until(lambda: all(len(client.text) > 5 for client in clients))


def _check(clients: list[Client], reasons: list[str], server: KeptServer) -> None:
    for client in clients:
        assert (client.text, client.finish_reason) == (fake_text(client.seed, MAX_TOKENS), "length")
        assert client.num_connections > 1
    assert server.stop() == 0
    trace = verified(server.trace.parent)
    assert [event.reason for event in trace.of(Recovered)] == reasons
    assert trace.result.clean_end


async def test_a_keeper_lets_another_engine_go_on(folder: Path, servers: list[KeptServer]) -> None:
    servers.append(KeptServer(folder, *FLAGS))
    server = servers[0].wait_ready()
    clients = [Client(server, number) for number in range(NUM_STREAMS)]
    running = asyncio.gather(*(client.run() for client in clients))
    for number in range(2):
        await _started(clients)
        await asyncio.sleep(0.2)
        server.kill_engine()
        await asyncio.to_thread(server.wait_for, "ready", number + 2)
    await running
    _check(clients, ["died (killed by SIGKILL)"] * 2, server)


async def test_a_server_that_starts_again_goes_on(folder: Path, servers: list[KeptServer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = (*FLAGS, "--recover", "spool", "--port", str(port))
    servers.append(KeptServer(folder, *flags))
    server = servers[0].wait_ready()
    clients = [Client(server, number) for number in range(NUM_STREAMS)]
    running = asyncio.gather(*(client.run() for client in clients))
    await _started(clients)
    pids = [server.process.pid, *server.processes]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    await asyncio.to_thread(wait_until, lambda: not any(map(is_running, pids)))
    servers.append(KeptServer(folder, *flags))
    await asyncio.to_thread(servers[1].wait_ready)
    await running
    _check(clients, ["process"], servers[1])
    assert list((folder / "spool").iterdir()) == []


@pytest.mark.soak
async def test_200_kills_under_load(folder: Path, servers: list[KeptServer]) -> None:
    servers.append(KeptServer(folder, "--fake", "base_ns=5000000", standby_seconds=0.5, max_deaths=10**6))
    server = servers[0].wait_ready()
    chance, is_over, num_streams = random.Random(0), False, 0

    async def visit(number: int) -> None:
        nonlocal num_streams
        while not is_over:
            client = Client(server, number)
            await client.run()
            assert (client.text, client.finish_reason) == (fake_text(client.seed, MAX_TOKENS), "length")
            num_streams += 1
            number += NUM_STREAMS

    running = asyncio.gather(*(visit(number) for number in range(NUM_STREAMS)))
    for number in range(200):
        await asyncio.sleep(chance.random() * 1.5)
        assert not running.done()
        server.kill_engine()
        await asyncio.to_thread(server.wait_for, "ready", number + 2)
    is_over = True
    await running
    assert server.stop() == 0
    trace = verified(server.trace.parent)
    assert len(trace.of(Recovered)) == 200
    assert len(trace.of(Arrived)) == num_streams
