"""Connections of the world deliver in order and in pieces, and are reset where a real connection is."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tests.world.machine.network import SocketTransport
from tests.world.machine.process import Process
from tests.world.machine.world import World

ADDRESS = ("127.0.0.1", 7000)


class End(asyncio.Protocol):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(SocketTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


class Two:
    """A server and a client that are connected."""

    def __init__(self, seed: int = 1) -> None:
        self.world = world = World(seed)
        self.server, self.client = Process(world, "server"), Process(world, "client")
        self.listening = world.network.listen(self.server, ADDRESS)
        self.theirs: list[End] = []
        self.ours = End()
        self.server.loop.add_reader(self.listening, self._accept)
        self.client.loop.create_task(self.client.loop.create_connection(lambda: self.ours, *ADDRESS))
        world.run(lambda: bool(self.theirs and hasattr(self.theirs[0], "transport")), most_seconds=1)

    def _accept(self) -> None:
        accepted, _ = self.listening.accept()
        end = End()
        self.theirs.append(end)
        self.server.loop.create_task(self.server.loop.connect_accepted_socket(lambda: end, accepted))

    def in_client(self, act: object) -> None:
        self.client.loop.call_soon(act)  # type: ignore[arg-type]


def test_bytes_arrive_whole_and_in_order_however_they_are_split() -> None:
    two = Two()
    sent = [bytes([number % 256]) * (number % 1000 + 1) for number in range(500)]
    two.in_client(lambda: [two.ours.transport.write(each) for each in sent])
    two.world.run_for(5)
    assert b"".join(two.theirs[0].received) == b"".join(sent)
    assert len(two.theirs[0].received) > 5


def test_what_the_kernel_has_arrives_after_the_writers_death() -> None:
    two = Two()
    two.in_client(lambda: two.ours.transport.write(b"last words"))
    two.world.run(lambda: bool(two.client.loop.due_ns is None), most_seconds=1)
    two.client.kill()
    two.world.run_for(1)
    assert (b"".join(two.theirs[0].received), two.theirs[0].lost) == (b"last words", [None])


def test_unread_bytes_reset_the_connection() -> None:
    two = Two()
    two.in_client(two.ours.transport.pause_reading)
    two.world.run_for(1)
    two.server.loop.call_soon(two.theirs[0].transport.write, b"not read")
    two.world.run_for(1)
    two.client.kill()
    two.world.run_for(1)
    assert isinstance(two.theirs[0].lost[0], ConnectionResetError)


def test_a_writer_waits_for_a_reader_that_does_not_read() -> None:
    two = Two()
    two.in_client(two.ours.transport.pause_reading)
    two.world.run_for(1)
    big = bytes(1_000_000)
    two.server.loop.call_soon(two.theirs[0].transport.write, big)
    two.world.run_for(1)
    assert two.theirs[0].transport.get_write_buffer_size() > 900_000
    two.in_client(two.ours.transport.resume_reading)
    two.world.run_for(5)
    assert b"".join(two.ours.received) == big
    assert two.theirs[0].transport.get_write_buffer_size() == 0


def test_nobody_listens() -> None:
    world = World(1)
    client, errors = Process(world, "client"), []

    async def program() -> int:
        with pytest.raises(ConnectionRefusedError) as raised:
            await client.loop.create_connection(End, *ADDRESS)
        errors.append(raised.value)
        return 0

    client.run(program())
    world.run(lambda: client.is_dead, most_seconds=1)
    assert len(errors) == 1
