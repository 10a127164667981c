"""A remote engine and the engine's end of its connection, over a real socket pair, before an engine double."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest
from msgspec import structs

from eventlm.config import Config
from eventlm.control.engine import InferenceEngine
from eventlm.control.frames import FrameConnection
from eventlm.control.front_end_calls import FrontEndCalls
from eventlm.control.front_end_link import FrontEndLink
from eventlm.control.front_end_protocol import (
    Answer,
    Beat,
    FrontEndSetup,
    Leave,
    Outputs,
    Question,
    Refusal,
    StateChanged,
    Word,
    decode_to_front_end,
    encode,
)
from eventlm.control.metrics_components import FrontEndMetrics
from eventlm.control.rate_limits import RateLimitError, RateLimits
from eventlm.control.request import (
    ClosingOutput,
    ContextLengthError,
    EmbeddingOutput,
    EngineRequest,
    EngineUnavailableError,
    FinishedOutput,
    QueueFullError,
    RequestHandle,
    ResumedReply,
    Submission,
    TakenOver,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.sampler_params import SamplerParams
from eventlm.server.engine_protocol import Engine
from eventlm.server.generation import submit
from eventlm.server.remote_engine import RemoteEngine

from .engine_double import EngineDouble, spell

FIGURES = [FrontEndMetrics(index=3, is_up=True, num_restarts=0)]
SETUP = FrontEndSetup(
    index=3,
    config=Config(),
    model="fake",
    model_names=["test"],
    max_model_len=256,
    vocab_size=512,
    origin_ns=0,
    created=1,
    state="ready",
)


class Pair:
    """Both ends. `frames` are the messages with outputs that the front end got."""

    def __init__(self, double: EngineDouble, **limits: Any) -> None:
        self.double = double
        self.link = FrontEndLink(3, FrontEndCalls(double, lambda: FIGURES), **limits)  # type: ignore[arg-type]
        self.frames: list[Outputs] = []

    async def open(self) -> Pair:
        ours, theirs = socket.socketpair()
        await self.link.open(ours)
        self.connection = await FrameConnection.open(
            theirs, self._receive, lambda: self.engine.fail("the engine's process has died")
        )
        self.engine = RemoteEngine(SETUP, lambda message: self.connection.send(encode(message)))
        return self

    def _receive(self, body: bytes) -> None:
        message = decode_to_front_end(body)
        if isinstance(message, Outputs):
            self.frames.append(message)
        self.engine.take(message)  # type: ignore[arg-type]


@asynccontextmanager
async def connected(text: str = "Hello, world", **limits: Any) -> AsyncIterator[Pair]:
    pair = await Pair(EngineDouble(spell(text)), **limits).open()
    async with asyncio.timeout(30):
        yield pair
    pair.link.lose("over")
    pair.connection.abort()


def request(**fields: Any) -> EngineRequest:
    params = SamplerParams(max_tokens=fields.pop("max_tokens", 64))
    return EngineRequest(model="test", prompt_token_ids=[72, 105], params=params, **fields)


def assert_tidy(pair: Pair) -> None:
    assert not pair.engine._streams
    assert not pair.engine._calls
    assert not pair.link._answering


async def read(handle: RequestHandle) -> tuple[bytes, list[str]]:
    tokens, reasons = [], []
    async for output in handle:
        if isinstance(output, TokensOutput):
            tokens += output.token_ids
        elif isinstance(output, FinishedOutput):
            reasons.append(output.reason)
    return bytes(tokens), reasons


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_a_request_comes_through_and_its_outputs_come_back() -> None:
    async with connected() as pair:
        [handle] = await pair.engine.submit([request(priority=-2)])
        assert await read(handle) == (b"Hello, world", ["eos"])
        # The number of the front end is not its own word.
        assert pair.double.requests == [request(priority=-2, front_end=3)]
        assert_tidy(pair)


async def test_outputs_can_go_elsewhere_than_to_the_handles() -> None:
    async with connected() as pair:
        found: list[tuple[int, Any]] = []
        over = asyncio.Event()

        def take(place: int, output: Any) -> None:
            found.append((place, output))
            if sum(isinstance(each, FinishedOutput) for _, each in found) == 3:
                over.set()

        await pair.engine.submit([request(), request(n=2)], on_output=take)
        await over.wait()
        assert {(place, output.index) for place, output in found} == {(0, 0), (1, 0), (1, 1)}
        assert len(found) == 3 * 13
        assert_tidy(pair)


async def test_a_reply_can_be_read_again_by_another_reader() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.script_end = None
        pair.double.step_seconds = 0.001
        submission = Submission(reply_id="cmpl-1", owner="me", edge_state=b"state", is_resumable=True)
        first: list[Any] = []
        again: list[Any] = []
        long = request(max_tokens=200)
        await pair.engine.submit([long], submission=submission, on_output=lambda _, output: first.append(output))
        await until(lambda: len(first) > 5)
        with pytest.raises(UnknownReplyError):
            await pair.engine.resume("cmpl-1", "somebody else", lambda *_: None)
        reply = await pair.engine.resume("cmpl-1", "me", lambda _, output: again.append(output))
        assert (reply.submission, reply.requests, reply.reader) == (submission, [0], 1)
        once = RateLimits(requests_per_minute=1)
        with pytest.raises(UnknownReplyError):
            await pair.engine.resume("cmpl-2", "me", lambda *_: None, once)
        with pytest.raises(RateLimitError):
            await pair.engine.resume("cmpl-1", "me", lambda *_: None, once)
        await until(lambda: len(again) > 10)
        assert TakenOver() in first
        both = list(zip([output for output in first if output != TakenOver()], again, strict=False))
        assert len(both) > 5
        assert all(one == other for one, other in both)
        pair.engine.leave("cmpl-1", reply.reader)
        num_heard = len(again)
        await pair.engine.cancel_reply("cmpl-1", "me")
        await until(lambda: isinstance(first[-1], FinishedOutput))
        assert len(again) == num_heard
        assert_tidy(pair)


async def test_readers_of_a_front_end_that_is_lost_leave() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.script_end = None
        submission = Submission(reply_id="cmpl-1", is_resumable=True)
        await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        reply = await pair.engine.resume("cmpl-1", "", lambda *_: None)
        assert pair.double.registry.find("cmpl-1", "").reader == reply.reader
        pair.connection.abort()
        await pair.link.lost
        assert pair.double.registry.find("cmpl-1", "").reader is None


async def test_who_submitted_is_a_reader_that_leaves_with_its_front_end() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.script_end = None
        for name in ("cmpl-1", "cmpl-2"):
            submission = Submission(reply_id=name, is_resumable=True)
            await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        pair.engine.leave("cmpl-2", 0)
        await until(lambda: pair.link._reading == {Leave("cmpl-1", 0)})
        pair.connection.abort()
        await pair.link.lost
        assert [pair.double.registry.find(name, "").reader for name in ("cmpl-1", "cmpl-2")] == [None, None]


async def test_all_outputs_of_a_tick_are_one_message() -> None:
    async with connected() as pair:
        handles = await pair.engine.submit([request(n=3) for _ in range(20)])
        found = await asyncio.gather(*map(read, handles))
        assert [reasons for _, reasons in found] == [["eos"] * 3] * 20
        assert {bytes(sorted(tokens)) for tokens, _ in found} == {bytes(sorted(b"Hello, world" * 3))}
        assert_tidy(pair)
        # 12 tokens and an end of 60 sequences each: not 780 messages.
        assert sum(len(frame.items) for frame in pair.frames) == 60 * 13
        assert len(pair.frames) < 60


async def test_text_ends_and_cancels_go_the_other_way() -> None:
    async with connected() as pair:
        pair.double.script_end = None
        first, second = await pair.engine.submit([request(has_text_ends=True), request()])
        output = await anext(first)
        assert isinstance(output, TokensOutput)
        first.text_ended(0, 1, "stop")
        second.cancel("client")
        assert (await read(first))[1] == ["stop"]
        assert (await read(second))[1] == ["cancelled"]
        assert pair.double.text_ends == [(0, 0, 1, "stop")]
        assert pair.double.cancelled == [(1, "client")]
        assert_tidy(pair)


async def test_a_sequence_that_closes_is_answered_by_its_text() -> None:
    async with connected("Hi") as pair:
        [handle] = await pair.engine.submit([request(has_text_ends=True)])
        async for output in handle:
            if isinstance(output, ClosingOutput):
                handle.text_ended(output.index, output.position)
        assert pair.double.text_ends == [(0, 0, 2, "")]


async def test_errors_of_the_engine_are_raised_at_the_front_end() -> None:
    async with connected() as pair:
        pair.double.submit_error = QueueFullError("the queue is full")
        with pytest.raises(QueueFullError, match="the queue is full"):
            await pair.engine.submit([request()])
        pair.double.submit_error = None
        pair.double.submit_error = RuntimeError("what a client sent")  # type: ignore[assignment]
        with pytest.raises(EngineUnavailableError, match="could not answer"):
            await pair.engine.submit([request()])
        with pytest.raises(ContextLengthError):
            await pair.engine.submit([request(max_tokens=1000)])
        assert not pair.double.requests


async def test_a_request_whose_client_left_while_it_was_submitted_is_cancelled() -> None:
    async with connected() as pair:
        pair.double.submit_seconds = 0.05
        pair.double.script_end = None
        waiting = asyncio.create_task(pair.engine.submit([request(), request()]))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await until(lambda: len(pair.double.cancelled) == 2)
        await until(lambda: not pair.engine._streams)


async def test_an_explanation_that_nobody_waits_for_is_not_made() -> None:
    async with connected() as pair:
        ended = asyncio.Event()

        async def explain(reply_id: str, owner: str) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        pair.double.explain = explain  # type: ignore[method-assign]
        waiting = asyncio.create_task(pair.engine.explain("cmpl-1", ""))
        await until(lambda: pair.link._answering)
        waiting.cancel()
        await ended.wait()
        await until(lambda: not pair.link._answering)
        assert_tidy(pair)
        assert await pair.engine.read_metrics()


async def test_generations_work_over_it() -> None:
    async with connected() as pair:
        from eventlm.server.fake_tokenizer import FakeTokenizer

        generation = await submit(pair.engine, FakeTokenizer(), [request(stop=("wor",), has_text_ends=True)])
        outputs = [output async for output in generation.outputs()]
        assert "".join(output.text for output in outputs) == "Hello, "
        assert outputs[-1].stop_reason == "wor"


@pytest.mark.parametrize("name", sorted(name for name in vars(Engine) if not name.startswith("_")))
def test_both_engines_have_every_method_of_the_protocol(name: str) -> None:
    method = vars(Engine)[name]
    if isinstance(method, property):
        return
    for kind in (RemoteEngine, InferenceEngine):
        mine = getattr(kind, name)
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(method)
        assert inspect.signature(mine) == inspect.signature(method)


def test_every_question_has_a_handler() -> None:
    calls = FrontEndCalls(EngineDouble(spell("")), list)  # type: ignore[arg-type]
    assert set(calls._handlers) == set(get_args(Question))
    assert set(calls._listeners) == set(get_args(Word))


async def test_figures_are_the_engines_and_those_of_all_front_ends() -> None:
    async with connected() as pair:
        metrics = await pair.engine.read_metrics()
        assert metrics == structs.replace(await pair.double.read_metrics(), front_ends=FIGURES)


async def test_the_engines_state_is_told() -> None:
    async with connected() as pair:
        assert pair.engine.state == "ready"
        pair.link.send(StateChanged("draining"))
        await until(lambda: pair.engine.state == "draining")


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
            pair.double.handles[0].put(EmbeddingOutput(0, bytes(400_000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert "1,000,000 bytes unread" in await pair.link.lost


async def test_a_reply_is_not_read_again_while_too_much_is_on_its_way() -> None:
    async with connected(max_backlog_bytes=1_000_000, max_replay_bytes=4_000_000) as pair:
        pair.double.keep(seconds=60, max_bytes=10_000_000)
        pair.double.step_seconds = 60.0
        submission = Submission(reply_id="cmpl-1", is_resumable=True)
        await pair.engine.submit([request()], submission=submission, on_output=lambda *_: None)
        pair.double._sinks[0](EmbeddingOutput(0, bytes(1_500_000)))
        await pair.engine.read_metrics()
        transport: Any = pair.connection._transport
        transport.pause_reading()
        said: list[Any] = []
        send = pair.link.send
        pair.link.send = lambda message: (said.append(message), send(message))[1]  # type: ignore[method-assign]
        resumed = [asyncio.create_task(pair.engine.resume("cmpl-1", "", lambda *_: None)) for _ in range(5)]
        await until(lambda: sum(isinstance(message, Answer | Refusal) for message in said) == 5)
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
