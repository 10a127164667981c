from __future__ import annotations

import asyncio
import socket

from eventlm.system.frames import FrameConnection


class End:
    """One end of a pair, and what it has got."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.lost = asyncio.Event()
        self.got = asyncio.Event()

    async def open(self, end: socket.socket) -> End:
        self.connection = await FrameConnection.open(end, self._take, self.lost.set)
        return self

    async def wait_for(self, num_frames: int) -> list[bytes]:
        async with asyncio.timeout(20):
            while len(self.frames) < num_frames:
                self.got.clear()
                await self.got.wait()
        return self.frames

    def _take(self, body: bytes) -> None:
        self.frames.append(body)
        self.got.set()


async def test_messages_come_whole_and_in_order_both_ways() -> None:
    ours, theirs = socket.socketpair()
    one, other = await End().open(ours), await End().open(theirs)
    sizes = [0, 1, 3, 70_000, 5, 1_000_000, 4]
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for body in bodies:
        one.connection.send(body)
    other.connection.send(b"back")
    assert await other.wait_for(len(bodies)) == bodies
    assert await one.wait_for(1) == [b"back"]
    one.connection.abort()
    other.connection.abort()


async def test_messages_come_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    other = await End().open(theirs)
    bodies = [b"", b"a", b"bc" * 300, b"d"]
    data = b"".join(len(body).to_bytes(4) + body for body in bodies)
    for index in range(0, len(data), 3):
        ours.sendall(data[index : index + 3])
        await asyncio.sleep(0)
    assert await other.wait_for(len(bodies)) == bodies
    # Half a message, and nobody to send the rest.
    ours.sendall(b"\0\0\0\x09half")
    ours.close()
    async with asyncio.timeout(20):
        await other.lost.wait()
    assert other.frames == bodies


async def test_close_waits_until_everything_is_sent() -> None:
    ours, theirs = socket.socketpair()
    one, other = await End().open(ours), await End().open(theirs)
    one.connection.send(b"x" * 3_000_000)
    one.connection.send(b"last words")
    await one.connection.close()
    assert (await other.wait_for(2))[1] == b"last words"
    async with asyncio.timeout(20):
        await other.lost.wait()
    assert not one.lost.is_set()


async def test_what_is_not_read_counts_as_backlog() -> None:
    ours, theirs = socket.socketpair()
    one = await End().open(ours)
    for _ in range(8):
        one.connection.send(bytes(1_000_000))
        await asyncio.sleep(0)
    assert 4_000_000 < one.connection.backlog_bytes <= 8_000_032
    one.connection.abort()
    one.connection.send(b"too late")
    theirs.close()


async def test_nothing_comes_after_abort() -> None:
    ours, theirs = socket.socketpair()
    frames: list[bytes] = []

    def take(body: bytes) -> None:
        frames.append(body)
        connection.abort()

    lost = asyncio.Event()
    connection = await FrameConnection.open(theirs, take, lost.set)
    ours.sendall(b"\0\0\0\x01a\0\0\0\x01b")
    while not frames:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert frames == [b"a"]
    assert not lost.is_set()
    ours.close()
