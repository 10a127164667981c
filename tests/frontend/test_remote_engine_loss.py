"""What is left when one end of the connection between front end and engine is lost, or is about to be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventlm.engine.request import EngineUnavailableError, PooledOutput, ResumedReply, Submission
from eventlm.frontend.protocol import Beat, CallError, CallResult, LeaveReply, encode
from tests.server.remote_pair import assert_tidy, connected, read, request, until


async def test_readers_of_a_front_end_that_is_lost_leave() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.script_end = None
        submission = Submission(reply_id="cmpl-1", is_resumable=True)
        await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        reply = await pair.engine.resume("cmpl-1", "", lambda *_: None)
        assert list(pair.double.registry.find("cmpl-1", "").readers) == [reply.reader]
        pair.connection.abort()
        await pair.link.lost
        assert not pair.double.registry.find("cmpl-1", "").readers


async def test_who_submitted_is_a_reader_that_leaves_with_its_front_end() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.script_end = None
        for name in ("cmpl-1", "cmpl-2"):
            submission = Submission(reply_id=name, is_resumable=True)
            await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        pair.engine.leave("cmpl-2", 0)
        await until(lambda: [*pair.link._reading] == [LeaveReply("cmpl-1", 0)])
        pair.connection.abort()
        await pair.link.lost
        assert not any(pair.double.registry.find(name, "").readers for name in ("cmpl-1", "cmpl-2"))


async def test_an_engine_that_dies_ends_its_streams_with_the_reason() -> None:
    async with connected() as pair:
        pair.double.script_end = None
        [handle] = await pair.engine.submit([request()])
        await anext(handle)
        pair.double.fail(EngineUnavailableError("the engine has died: no worker is left"))
        with pytest.raises(EngineUnavailableError, match="no worker is left"):
            await read(handle)
        assert_tidy(pair)


async def test_an_engine_whose_process_has_gone_ends_everything() -> None:
    async with connected() as pair:
        pair.double.script_end = None
        [handle] = await pair.engine.submit([request()])
        pair.double.submit_seconds = 60.0
        waiting = asyncio.create_task(pair.engine.submit([request()]))
        await anext(handle)
        pair.link.lose("killed")
        with pytest.raises(EngineUnavailableError, match="process has died"):
            await read(handle)
        with pytest.raises(EngineUnavailableError, match="process has died"):
            await waiting
        with pytest.raises(EngineUnavailableError, match="process has died"):
            await pair.engine.read_metrics()
        assert pair.engine.state == "dead"


async def test_a_front_end_that_has_gone_is_lost_and_its_undecided_requests_are_cancelled() -> None:
    async with connected() as pair:
        pair.double.submit_seconds = 60.0
        waiting = asyncio.create_task(pair.engine.submit([request()]))
        await until(lambda: pair.link._answering)
        pair.connection.abort()
        assert await pair.link.lost == "closed its connection"
        await until(lambda: not pair.link._answering)
        waiting.cancel()


async def test_a_front_end_that_does_not_read_is_lost_at_a_bound() -> None:
    async with connected(max_backlog_bytes=1_000_000) as pair:
        pair.double.step_seconds = 60.0
        await pair.engine.submit([request()])
        # As if its process stood still.
        pair.connection._transport.pause_reading()  # type: ignore[union-attr]
        for _ in range(4):
            assert not pair.link.lost.done()
            pair.double.handles[0].put(PooledOutput(0, bytes(400_000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert "1,000,000 bytes unread" in await pair.link.lost


async def test_a_reply_is_not_read_again_while_too_much_is_on_its_way() -> None:
    async with connected(max_backlog_bytes=1_000_000, max_replay_bytes=4_000_000) as pair:
        pair.double.keep(seconds=60, max_bytes=10_000_000)
        pair.double.step_seconds = 60.0
        submission = Submission(reply_id="cmpl-1", is_resumable=True)
        await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        pair.double._sinks[0](PooledOutput(0, bytes(1_500_000)))
        await pair.engine.read_metrics()
        transport: Any = pair.connection._transport
        transport.pause_reading()
        said: list[Any] = []
        send = pair.link.send
        pair.link.send = lambda message: (said.append(message), send(message))[1]  # type: ignore[method-assign]
        resumed = [asyncio.create_task(pair.engine.resume("cmpl-1", "", lambda *_: None)) for _ in range(5)]
        await until(lambda: sum(isinstance(message, CallResult | CallError) for message in said) == 5)
        assert not pair.link.lost.done()
        transport.resume_reading()
        found = await asyncio.gather(*resumed, return_exceptions=True)
        assert isinstance(found[0], ResumedReply)
        assert all(isinstance(each, EngineUnavailableError) for each in found[1:])


async def test_a_front_end_that_talks_nonsense_is_lost() -> None:
    async with connected() as pair:
        pair.connection.send(encode(Beat(num_requests=1, cpu_ns=2, resident_bytes=3)))
        await until(lambda: pair.link.num_beats == 1)
        pair.connection.send(b"\xc1 nonsense")
        assert "cannot be read" in await pair.link.lost
