"""Simulated sockets and pipes behave like real ones under random operations.

The two ends of a connection make the same operations, one after the other, in both worlds. Both worlds must come to
show each end the same: bytes, and whether and how the connection was lost. Ignored is what TCP leaves open: how much
unsent data arrives before a close that does not wait for it, and whether a reset after the end of the stream is seen as
one.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import uvloop

from eventlm.system.child_pipe import ZmqChildPipe
from eventlm.system.frames import FrameConnection
from eventlm.system.parent_pipe import ZmqParentPipe
from eventlm.system.threads import run_blocking
from tests.world.machine.blocking import run_program
from tests.world.machine.host import WorldPipes
from tests.world.machine.process import Process
from tests.world.machine.world import World

#: What a kernel accepts at once, whatever its buffer sizes.
_SURELY_TAKEN = 4096
#: Sizes of writes: some fit every kernel's buffers, some do not.
_SIZES = (1, 100, 3000, 30_000, 600_000)
_KERNEL_BYTES = 65_536
_NUM_SCRIPTS, _NUM_OPERATIONS = 40, 9


class Operation(NamedTuple):
    """An operation of end 0 or 1. size: how many bytes it writes."""

    end: int
    what: str
    size: int = 0


class End(asyncio.Protocol):
    """Records what it sees."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: list[Exception | None] = []
        self.pauses: list[str] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.pauses.append("pause")

    def resume_writing(self) -> None:
        self.pauses.append("resume")


def _act(end: End, operation: Operation, content: Iterator[bytes]) -> None:
    if end.transport.is_closing() and operation.what != "write":
        return
    match operation.what:
        case "write":
            data = next(content)[: operation.size]
            # asyncio drops the data then; uvloop treats it as an error, and so does the world.
            if not end.lost:
                end.transport.write(data)
        case "pause":
            end.transport.pause_reading()
        case "resume":
            end.transport.resume_reading()
        case "close":
            end.transport.close()
        case _:
            end.transport.abort()


class Seen(NamedTuple):
    """What one end has seen. num_received, error: None where TCP leaves it open. error: how the connection was lost."""

    num_received: int | None
    is_lost: bool
    is_error: bool | None

    @classmethod
    def of(cls, end: End, *, is_open: bool) -> Seen:
        """What an end has seen. is_open: TCP leaves the details open."""
        error = bool(end.lost) and end.lost[0] is not None
        return cls(None if is_open else len(end.received), bool(end.lost), None if is_open else error)


class Step(NamedTuple):
    """An operation, and what each end has seen after it; None: the end's process has died."""

    operation: Operation
    seen: list[Seen | None]
    is_open: list[bool]


def _content(seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    while True:
        yield chance.randbytes(max(_SIZES))


def _simulate(seed: int) -> list[Step]:
    """Draw a script of operations and run it in the world."""
    chance = random.Random(seed)
    world = World(seed)
    processes = [Process(world, name) for name in ("first", "second")]
    ends = [End(), End()]
    for process, end, sock in zip(processes, ends, world.network.pair(*processes), strict=True):
        process.loop.create_task(process.loop.create_connection(lambda end=end: end, sock=sock))
    world.run_for(1)
    content = _content(seed)
    steps: list[Step] = []
    num_written, is_paused, is_open = [0, 0], [False, False], [False, False]
    for _ in range(_NUM_OPERATIONS):
        number = chance.randrange(2)
        what = chance.choice(["write"] * 6 + ["pause", "pause", "resume", "resume", "close", "abort", "die"])
        size = chance.choice(_SIZES) if what == "write" else 0
        end, peer, other = ends[number], ends[1 - number], 1 - number
        if processes[number].is_dead or (end.lost and what != "write"):
            continue
        unread = [num_written[1 - each] - len(ends[each].received) for each in (0, 1)]
        if what in ("close", "abort", "die") and (
            unread[number] or (what != "close" and unread[other] > _SURELY_TAKEN)
        ):
            is_open = [True, True]
        if end.transport.is_closing() or peer.transport.is_closing() or processes[other].is_dead:
            is_open = [True, True]
        operation = Operation(number, what, size)
        if what == "die":
            processes[number].kill()
        else:
            num_written[number] += size
            processes[number].loop.call_soon(_act, end, operation, content)
        is_paused[number] = what == "pause" or (is_paused[number] and what != "resume")
        world.run_for(1)
        seen = [
            None if process.is_dead else Seen.of(each, is_open=open_)
            for process, each, open_ in zip(processes, ends, is_open, strict=True)
        ]
        steps.append(Step(operation, seen, [*is_open]))
    _check(ends)
    return steps


def _check(ends: list[End]) -> None:
    """Check what must hold in both worlds."""
    for end in ends:
        assert len(end.lost) <= 1
        assert all(error is None or isinstance(error, ConnectionError) for error in end.lost)
        assert end.pauses == (["pause", "resume"] * len(end.pauses))[: len(end.pauses)]


async def _do_really(seed: int, steps: list[Step], pair: tuple[socket.socket, socket.socket]) -> None:
    """Run the script over real sockets. After each operation, wait until what the world showed is seen."""
    loop = asyncio.get_running_loop()
    ends = [End(), End()]
    for end, sock in zip(ends, pair, strict=True):
        await loop.create_connection(lambda end=end: end, sock=sock)
    content = _content(seed)
    dead: set[int] = set()
    for number, step in enumerate(steps):
        operation = step.operation
        _act(ends[operation.end], operation, content)
        if operation.what == "die":
            dead.add(operation.end)
        found = await _wait_for(step, ends, dead)
        done = [each.operation for each in steps[: number + 1]]
        assert found == step.seen, f"seed {seed}, after {done}: {found} of {step.seen}"
    _check(ends)
    for end in ends:
        end.transport.abort()
    await asyncio.sleep(0)


async def _wait_for(step: Step, ends: list[End], dead: set[int]) -> list[Seen | None]:
    """What the ends have seen, once it is the same as in the world, or after a timeout."""
    # An operation takes effect in a later turn of the loop.
    await asyncio.sleep(0.002)
    for _ in range(1000):
        found = [None if index in dead else Seen.of(end, is_open=step.is_open[index]) for index, end in enumerate(ends)]
        if found == step.seen:
            break
        await asyncio.sleep(0.01)
    return found


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = socket.create_connection(listening.getsockname())
        second, _ = listening.accept()
    for each in (first, second):
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
    return first, second


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_are_as_real_ones(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        for seed in range(_NUM_SCRIPTS):
            runner.run(_do_really(seed, _simulate(seed), _tcp_pair()))


def _frames(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice((0, 1, 5, 3000, 200_000))) for _ in range(chance.randrange(1, 12))]


class FrameEnd:
    """Records the frames that one end of a connection receives."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.num_lost = 0
        self.connection: FrameConnection | None = None

    async def open(self, sock: Any) -> None:
        self.connection = await FrameConnection.open(sock, self.frames.append, self._lose)

    def _lose(self) -> None:
        self.num_lost += 1


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.001)
    raise TimeoutError


async def _send_frames(ends: list[FrameEnd], seed: int) -> None:
    """Both ends send, and the first closes once all of its frames have left."""
    first, second = (end.connection for end in ends)
    assert first is not None
    assert second is not None
    for body in _frames(seed):
        first.send(body)
        second.send(body[::-1])
        await asyncio.sleep(0)
    await _until(lambda: not second.backlog_bytes and len(ends[0].frames) == len(_frames(seed)))
    await first.close()
    await _until(lambda: bool(ends[1].num_lost))
    second.send(b"to nobody")


def test_frames_are_as_over_a_real_pair() -> None:
    for seed in range(10):
        world = World(seed)
        processes = [Process(world, name) for name in ("first", "second")]
        simulated, real = [FrameEnd(), FrameEnd()], [FrameEnd(), FrameEnd()]
        for process, end, sock in zip(processes, simulated, world.network.pair(*processes), strict=True):
            process.loop.create_task(end.open(sock))
        world.run_for(1)
        sending = processes[0].loop.create_task(_send_frames(simulated, seed))
        world.run(sending.done, most_seconds=10)

        async def do(real: list[FrameEnd] = real, seed: int = seed) -> None:
            for end, sock in zip(real, socket.socketpair(), strict=True):
                await end.open(sock)
            await _send_frames(real, seed)

        uvloop.run(do())
        for simulated_end, real_end, num_lost in zip(simulated, real, (0, 1), strict=True):
            assert simulated_end.frames == real_end.frames
            assert simulated_end.num_lost == real_end.num_lost == num_lost


class Messages(NamedTuple):
    """The messages of a pipe: sent before the child is there, then in both directions, then after the child's death."""

    early: list[list[bytes]]
    to_child: list[list[bytes]]
    to_parent: list[bytes]
    late: list[list[bytes]]


def _messages(seed: int) -> Messages:
    chance = random.Random(seed)

    def body() -> bytes:
        return chance.randbytes(chance.choice((0, 1, 50, 100_000)))

    def several() -> list[list[bytes]]:
        return [[body() for _ in range(chance.randrange(1, 4))] for _ in range(chance.randrange(8))]

    return Messages(several(), several(), [body() for _ in range(chance.randrange(8))], several())


def _pipe_in_world(seed: int, messages: Messages) -> tuple[list[list[bytes]], list[bytes]]:
    world = World(seed)
    parent, child = Process(world, "parent"), Process(world, "child")
    pipe = WorldPipes(parent).open()
    taken: list[list[bytes]] = []
    answers: list[bytes] = []

    async def act_as_child() -> None:
        end = WorldPipes(child).open_child(*pipe.addresses)
        sender = end.sender()
        for message in messages.to_parent:
            sender.send(message)
        while await end.wait(1):
            taken.append(await end.receive())

    async def act() -> None:
        for frames in messages.early:
            pipe.send(*frames)
        run_program(child, act_as_child, lambda _: child.end(0))
        for frames in messages.to_child:
            pipe.send(*frames)
        for _ in messages.to_parent:
            answers.append(await pipe.receive())
        await asyncio.sleep(2)
        for frames in messages.late:
            pipe.send(*frames)
        pipe.close()

    done = parent.loop.create_task(act())
    world.run(done.done, most_seconds=10)
    return taken, answers


async def _real_pipe(messages: Messages) -> tuple[list[list[bytes]], list[bytes]]:
    pipe = ZmqParentPipe()
    for frames in messages.early:
        pipe.send(*frames)
    child = ZmqChildPipe(*pipe.addresses)
    sender = child.sender()
    for frames in messages.to_child:
        pipe.send(*frames)
    for message in messages.to_parent:
        sender.send(message)
    answers = [await pipe.receive() for _ in messages.to_parent]
    wanted = len(messages.early) + len(messages.to_child)
    taken = [await asyncio.to_thread(run_blocking, child.receive()) for _ in range(wanted)]
    assert not run_blocking(child.wait(0.02))
    sender.close()
    child.close()
    for frames in messages.late:
        pipe.send(*frames)
    pipe.close()
    return taken, answers


def test_message_pipes_are_as_real_ones() -> None:
    for seed in range(15):
        messages = _messages(seed)
        simulated = _pipe_in_world(seed, messages)
        assert simulated == asyncio.run(_real_pipe(messages)), f"seed {seed}"
        assert simulated == (messages.early + messages.to_child, messages.to_parent)
