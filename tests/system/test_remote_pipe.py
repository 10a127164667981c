"""A pipe over TCP loses nothing while its child connects, and nobody without the run's keys gets anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
from msgspec import structs

from eventlm.system.child_pipe import ZmqChildPipe
from eventlm.system.remote_ends import RemoteEnds
from eventlm.system.remote_pipe import RemoteParentPipe, RunKeys
from eventlm.system.threads import run_blocking
from tests.processes import PATIENCE_SECONDS

#: As long as the handshakes of a test take, several times over.
LONG_S = 0.3


@pytest.fixture
async def parent() -> AsyncIterator[RemoteParentPipe]:
    pipe = RemoteParentPipe("127.0.0.1", RunKeys())
    yield pipe
    pipe.close()
    pipe.close()


async def received(child: ZmqChildPipe, count: int) -> list[list[bytes]]:
    found = []
    for _ in range(count):
        assert await child.wait(PATIENCE_SECONDS)
        found.append(await child.receive())
    return found


async def test_what_is_sent_before_the_child_is_there_arrives_in_order(parent: RemoteParentPipe) -> None:
    sent = [[b"%d" % number, b"beside"] for number in range(50)]
    for frames in sent[:30]:
        parent.send(*frames)
    child = ZmqChildPipe(*parent.addresses, parent.ends)
    for frames in sent[30:]:
        parent.send(*frames)
    assert await asyncio.to_thread(run_blocking, received(child, 50)) == sent
    sender, pulses = child.sender(), child.pulses()
    sender.send(b"up")
    assert await asyncio.wait_for(parent.receive(), PATIENCE_SECONDS) == b"up"
    assert pulses is not None
    assert run_blocking(pulses.receive(0)) is None
    message = None
    while message is None:
        parent.pulse(b"still here")
        message = await asyncio.to_thread(run_blocking, pulses.receive(0.05))
    assert message == b"still here"
    for end in (sender, pulses, child):
        end.close()  # type: ignore[attr-defined]


def without_keys(socket: zmq.Socket[bytes], ends: RemoteEnds) -> None:
    pass


def with_keys_of_another_run(socket: zmq.Socket[bytes], ends: RemoteEnds) -> None:
    structs.replace(ends, server=RunKeys().public).protect(socket)


@pytest.mark.parametrize("prepare", [without_keys, with_keys_of_another_run])
async def test_who_lacks_the_key_gets_nowhere(
    parent: RemoteParentPipe, prepare: Callable[[zmq.Socket[bytes], RemoteEnds], None]
) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as reader, context.socket(zmq.PUSH) as writer:
        for socket, address in ((reader, parent.addresses[0]), (writer, parent.addresses[1])):
            socket.set(zmq.LINGER, 0)
            prepare(socket, parent.ends)
            socket.connect(address)
        writer.send(b"from a stranger")
        parent.send(b"a prompt")
        heard = parent.receive()
        assert not await asyncio.to_thread(reader.poll, round(1000 * LONG_S))
        assert not heard.done()
        # All of it goes to the child.
        child = ZmqChildPipe(*parent.addresses, parent.ends)
        parent.send(b"another")
        assert await asyncio.to_thread(run_blocking, received(child, 2)) == [[b"a prompt"], [b"another"]]
        sender = child.sender()
        sender.send(b"up")
        assert await asyncio.wait_for(heard, PATIENCE_SECONDS) == b"up"
        sender.close()
        child.close()


async def test_a_child_does_not_speak_to_another_engine(parent: RemoteParentPipe) -> None:
    other = RemoteParentPipe("127.0.0.1", RunKeys())
    child = ZmqChildPipe(*other.addresses, parent.ends)
    other.send(b"a launch")
    assert not await asyncio.to_thread(run_blocking, child.wait(LONG_S))
    child.close()
    other.close()
