"""What a front end asks of a remote engine comes through, and the answers come back."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from msgspec import UNSET, structs

from eventlm.engine.admin import (
    Abort,
    AmbiguousRequestError,
    FlushCache,
    FlushedCache,
    ReadStatus,
    SwapPolicy,
    UnknownPolicyError,
    UnknownRequestError,
)
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.rate_limits import RateLimitError, RateLimits
from eventlm.engine.reports import NoReportError
from eventlm.engine.request import (
    ClosingOutput,
    ContextLengthError,
    EngineUnavailableError,
    FinishedOutput,
    IdempotencyKey,
    KeyReusedError,
    KeyTakenError,
    QueueFullError,
    Submission,
    TakenOver,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.frontend.protocol import StateChanged
from eventlm.frontend.remote_engine import RemoteEngine
from eventlm.text.engine import Engine
from eventlm.text.generation import submit
from tests.server.remote_pair import FIGURES, assert_tidy, connected, read, request, until


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

        def take(index: int, output: Any) -> None:
            found.append((index, output))
            if sum(isinstance(each, FinishedOutput) for _, each in found) == 3:
                over.set()

        await pair.engine.submit([request(), request(n=2)], on_output=take)
        await over.wait()
        assert {(index, output.index) for index, output in found} == {(0, 0), (1, 0), (1, 1)}
        assert len(found) == 3 * 13
        assert_tidy(pair)


async def test_what_an_operator_asks_comes_through() -> None:
    async with connected() as pair:
        flushed = await pair.engine.administer(FlushCache())
        assert flushed == await pair.double.administer(FlushCache())
        assert flushed.flushed == FlushedCache(num_blocks=7, num_replicas=2)
        assert (await pair.engine.administer(ReadStatus())).flushed is UNSET
        for action, error in [
            (Abort(request="job-1"), AmbiguousRequestError),
            (Abort(request="job-2"), UnknownRequestError),
            (SwapPolicy(name="lpm"), UnknownPolicyError),
        ]:
            with pytest.raises(error) as far:
                await pair.engine.administer(action)
            with pytest.raises(error) as near:
                await pair.double.administer(action)
            assert str(far.value) == str(near.value)
        assert_tidy(pair)


async def test_what_a_dashboard_asks_comes_through() -> None:
    async with connected() as pair:
        assert await pair.engine.list_oldest(1) == await pair.double.list_oldest(1)
        assert pair.double.limits == [1, 1]
        assert await pair.engine.report(60) == b"<p>60 s</p>"
        pair.double.report_error = NoReportError("busy", "another report is being made")
        with pytest.raises(NoReportError) as caught:
            await pair.engine.report(60)
        assert (caught.value.reason, str(caught.value)) == ("busy", "another report is being made")
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


async def test_a_reply_with_a_key_can_be_joined() -> None:
    async with connected() as pair:
        pair.double.keep(seconds=60)
        pair.double.step_seconds = 0.001
        key = IdempotencyKey(b"key", b"body")
        submission = Submission(reply_id="cmpl-1", owner="me", is_resumable=True, idempotency_key=key)
        heard: list[list[Any]] = [[], [], []]
        with pytest.raises(UnknownReplyError):
            await pair.engine.join(key, "me", lambda *_: None)
        await pair.engine.submit(
            [request()], submission=submission, on_output=lambda _, output: heard[0].append(output)
        )
        with pytest.raises(KeyTakenError):
            await pair.engine.submit([request()], submission=submission)
        with pytest.raises(KeyReusedError):
            await pair.engine.join(IdempotencyKey(b"key", b"another"), "me", lambda *_: None)
        for each in heard[1:]:
            await pair.engine.join(key, "me", lambda _, output, each=each: each.append(output))
        await until(lambda: all(each and isinstance(each[-1], FinishedOutput) for each in heard))
        assert heard[0] == heard[1] == heard[2]
        assert len(pair.double.requests) == 1
        for reader in (1, 2):
            pair.engine.leave("cmpl-1", reader)
        assert_tidy(pair)


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


async def test_an_abandoned_explanation_is_not_made() -> None:
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
        from eventlm.text.fake_tokenizer import FakeTokenizer

        generation = await submit(pair.engine, FakeTokenizer(), [request(stop=["wor"], has_text_ends=True)])
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


async def test_figures_are_the_engines_and_those_of_all_front_ends() -> None:
    async with connected() as pair:
        metrics = await pair.engine.read_metrics()
        assert metrics.now_ns
        near = structs.replace(await pair.double.read_metrics(), front_ends=FIGURES, now_ns=metrics.now_ns)
        assert metrics == near


async def test_the_engine_s_state_is_sent() -> None:
    async with connected() as pair:
        assert pair.engine.state == "ready"
        assert not pair.engine.paused
        assert pair.engine.has_worker
        changed = StateChanged(
            state="draining", paused=True, max_model_len=512, has_worker=False, num_waiting_for_room=2
        )
        pair.link.send(changed)
        await until(lambda: pair.engine.state == "draining")
        assert pair.engine.paused
        assert not pair.engine.has_worker
        assert pair.engine.num_waiting_for_room == 2
        assert pair.engine.max_model_len == 512
