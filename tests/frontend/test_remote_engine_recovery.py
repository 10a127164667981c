"""A remote engine whose engine's process dies, and goes on in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec import structs

from eventlm.config import Config
from eventlm.config.structs import RecordConfig
from eventlm.engine.admin import Pause
from eventlm.engine.request import (
    EngineUnavailableError,
    FinishedOutput,
    OnOutput,
    ResumedReply,
    Submission,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.frontend.protocol import (
    Abandon,
    Administer,
    Call,
    CancelRequest,
    ComeBack,
    EndText,
    GetMetrics,
    LeaveReply,
    MakeReport,
    Outputs,
    ResumeReply,
    ReturnedStream,
    ReturningStream,
    StateChanged,
    Submit,
    Submitted,
    call_error,
    call_result,
)
from eventlm.frontend.remote_engine import RemoteEngine
from eventlm.system.clock import SystemClock
from tests.server.remote_pair import SETUP, request

RECOVERING = structs.replace(SETUP, config=Config(record=RecordConfig(recover="memory")))
READY = StateChanged(state="ready", paused=False, max_model_len=256, origin_ns=7)
DONE = FinishedOutput(0, "length", 1, 0)


class Desk:
    """A remote engine, what it has sent since `pop`, and what its streams got."""

    def __init__(self, **changes: Any) -> None:
        self.sent: list[Any] = []
        self.engine = RemoteEngine(structs.replace(RECOVERING, **changes), self.sent.append, SystemClock())
        self.heard: list[Any] = []

    def on_output(self, index: int, output: Any) -> None:
        self.heard.append(output)

    async def begin(self, calling: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(calling)
        await asyncio.sleep(0)
        return task

    def submit(self, reply_id: str, **fields: Any) -> Coroutine[Any, Any, Any]:
        submission = Submission(reply_id=reply_id, **fields)
        return self.engine.submit([request()], submission=submission, on_output=self.on_output)

    def pop(self) -> list[Any]:
        sent = self.sent[:]
        self.sent.clear()
        return sent

    def come_back(self) -> Call:
        """The next engine is ready; the call by which the streams are named."""
        self.pop()
        self.engine.take(READY)
        [call] = self.pop()
        assert isinstance(call.operation, ComeBack)
        return call

    def assert_tidy(self) -> None:
        engine = self.engine
        assert not any((engine._calls, engine._streams, engine._streams.num_readers, engine._streams.num_edges))


async def test_a_stream_goes_on_after_what_it_has_had() -> None:
    desk = Desk()
    engine = desk.engine
    submitting = await desk.begin(desk.submit("cmpl-1"))
    [call] = desk.pop()
    assert isinstance(call.operation, Submit)
    assert call.operation.submission is not None
    assert call.operation.submission.edge_returns
    engine.take(call_result(1, Submitted([5], None)))
    [handle] = await submitting
    engine.take(Outputs([(1, 0, TokensOutput(0, 0, [65])), (1, 0, TokensOutput(0, 1, [66]))]))
    handle.text_ended(0, 2, "stop")
    engine.pause()
    assert (engine.state, engine.back.is_set()) == ("loading", False)
    # The next engine dies before it is ready.
    engine.take(structs.replace(RECOVERING, state="loading", server_id="server-2"))
    engine.pause()
    call = desk.come_back()
    assert call.operation == ComeBack([ReturningStream(1, "cmpl-1", 2, True)])
    assert not engine.back.is_set()
    engine.take(call_result(call.id, [ReturnedStream([5], 0)]))
    # It may not have got what was sent to the one before.
    assert desk.pop() == [EndText(5, 0, 2, "stop")]
    assert (engine.state, engine.back.is_set(), engine.server_id) == ("ready", True, "server-2")
    engine.take(Outputs([(1, 0, DONE)]))
    assert [type(output).__name__ for output in desk.heard] == ["TokensOutput", "TokensOutput", "FinishedOutput"]
    # The engine need not keep it for the next one.
    assert desk.pop() == [LeaveReply("cmpl-1", 0)]
    desk.assert_tidy()


async def test_what_the_next_engine_does_not_know_is_submitted_again_if_nothing_was_seen_of_it() -> None:
    desk = Desk()
    shown = await desk.begin(desk.submit("cmpl-1"))
    desk.engine.take(call_result(1, Submitted([5], None)))
    await shown
    desk.engine.take(Outputs([(1, 0, TokensOutput(0, 0, [65]))]))
    new, admitted = [await desk.begin(desk.submit(name)) for name in ("cmpl-2", "cmpl-3")]
    [_, of_new, _] = desk.pop()
    desk.engine.pause()
    call = desk.come_back()
    desk.engine.take(call_result(call.id, [None, None, ReturnedStream([8], 0)]))
    assert desk.pop() == [of_new]
    assert [str(output) for output in desk.heard[1:]] == ["the engine has died, and the reply is lost"]
    assert [handle.request for handle in await admitted] == [8]
    desk.engine.take(call_result(2, Submitted([9], None)))
    assert [handle.request for handle in await new] == [9]
    desk.engine.take(Outputs([(2, 0, DONE), (3, 0, DONE)]))
    desk.assert_tidy()


async def test_who_has_left_meanwhile_is_not_waited_for() -> None:
    desk = Desk()
    engine = desk.engine
    for number, name in enumerate(("cmpl-1", "cmpl-2"), start=1):
        submitting = await desk.begin(desk.submit(name, is_resumable=name == "cmpl-1"))
        engine.take(call_result(number, Submitted([number], None)))
        [handle] = await submitting
    abandoned = await desk.begin(desk.submit("cmpl-3"))
    engine.pause()
    engine.leave("cmpl-1", 0)
    handle.cancel()
    abandoned.cancel()
    await asyncio.sleep(0)
    engine.pause()
    call = desk.come_back()
    assert [stream.reply_id for stream in call.operation.streams] == ["cmpl-1", "cmpl-2"]  # type: ignore[union-attr]
    engine.take(call_result(call.id, [ReturnedStream([1], 0), ReturnedStream([2], 0)]))
    assert desk.pop() == [LeaveReply("cmpl-1", 0), CancelRequest(2, "client")]
    engine.take(Outputs([(1, 0, DONE), (2, 0, DONE)]))
    assert desk.pop() == [LeaveReply("cmpl-2", 0)]
    desk.assert_tidy()


async def test_a_submission_whose_caller_leaves_as_it_comes_back_is_cancelled() -> None:
    desk = Desk()
    submitting = await desk.begin(desk.submit("cmpl-1", is_resumable=True))
    desk.engine.pause()
    call = desk.come_back()
    submitting.cancel()
    await asyncio.sleep(0)
    desk.engine.take(call_result(call.id, [ReturnedStream([5], 0)]))
    assert desk.pop()[-2:] == [CancelRequest(5, "client"), LeaveReply("cmpl-1", 0)]
    desk.engine.take(Outputs([(1, 0, DONE)]))
    desk.assert_tidy()


async def test_readers_come_back_under_other_numbers() -> None:
    desk = Desk()
    engine = desk.engine
    reply = ResumedReply(
        submission=Submission(reply_id="cmpl-1"), group=[request()], requests=[5], reader=1, num_outputs=1
    )
    for number in (1, 2):
        resuming = await desk.begin(engine.resume("cmpl-1", "", desk.on_output))
        engine.take(call_result(number, structs.replace(reply, reader=number)))
        await resuming
    engine.take(Outputs([(1, 0, TokensOutput(0, 0, [65]))]))
    waiting = await desk.begin(engine.resume("cmpl-2", "", desk.on_output))
    engine.pause()
    call = desk.come_back()
    assert call.operation == ComeBack([ReturningStream(1, "cmpl-1", 1, False), ReturningStream(2, "cmpl-1", 0, False)])
    engine.leave("cmpl-1", 2)
    engine.take(call_result(call.id, [ReturnedStream([5], 1), ReturnedStream([5], 2)]))
    *_, left, again = desk.pop()
    assert left == LeaveReply("cmpl-1", 2)
    assert isinstance(again.operation, ResumeReply)
    engine.take(call_error(again.id, UnknownReplyError("it is over")))
    with pytest.raises(UnknownReplyError):
        await waiting
    engine.leave("cmpl-1", 1)
    assert desk.pop() == [LeaveReply("cmpl-1", 1)]
    desk.assert_tidy()


@pytest.mark.parametrize(
    "begin",
    [
        lambda engine, on_output: engine.submit([request()], on_output=on_output),
        lambda engine, on_output: engine.submit(
            [request()], submission=Submission(reply_id="cmpl-1", search_tokens=9), on_output=on_output
        ),
        lambda engine, on_output: engine.administer(Pause()),
    ],
)
async def test_what_must_not_be_done_twice_fails(
    begin: Callable[[RemoteEngine, OnOutput], Coroutine[Any, Any, Any]],
) -> None:
    desk = Desk()
    calling = await desk.begin(begin(desk.engine, desk.on_output))
    desk.engine.pause()
    with pytest.raises(EngineUnavailableError, match="the engine's process has died"):
        await calling
    desk.assert_tidy()


async def test_other_calls_are_made_again() -> None:
    desk = Desk()
    reading = await desk.begin(desk.engine.read_metrics())
    desk.engine.pause()
    later = await desk.begin(desk.engine.administer(Pause()))
    call = desk.come_back()
    desk.engine.take(call_result(call.id, []))
    await asyncio.sleep(0)
    first, second = desk.pop()
    assert (first, type(second.operation)) == (Call(1, GetMetrics()), Administer)
    assert not later.done()
    desk.engine.fail("it is over")
    for task in (reading, later):
        with pytest.raises(EngineUnavailableError, match="it is over"):
            await task


async def test_calls_wait_for_the_next_engine_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.frontend.remote_engine.RECOVERY_SECONDS", 0.01)
    desk = Desk()
    desk.engine.pause()
    with pytest.raises(EngineUnavailableError, match="the next one is not ready yet; try again"):
        await desk.submit("cmpl-1")
    desk.assert_tidy()


async def test_who_leaves_a_long_call_that_has_waited_abandons_that_one() -> None:
    desk = Desk()
    desk.engine.pause()
    long = await desk.begin(desk.engine.report(60))
    call = desk.come_back()
    other = await desk.begin(desk.engine.read_metrics())
    desk.engine.take(call_result(call.id, []))
    await asyncio.sleep(0.001)
    numbers = {type(each.operation): each.id for each in desk.pop()}
    long.cancel()
    await asyncio.sleep(0)
    assert desk.pop() == [Abandon(numbers[MakeReport])]
    assert not other.done()
    other.cancel()


async def test_streams_end_if_they_cannot_be_named() -> None:
    desk = Desk()
    submitting = await desk.begin(desk.submit("cmpl-1"))
    desk.engine.take(call_result(1, Submitted([5], None)))
    await submitting
    desk.engine.take(Outputs([(1, 0, TokensOutput(0, 0, [65]))]))
    desk.engine.pause()
    call = desk.come_back()
    desk.engine.take(call_error(call.id, EngineUnavailableError("the engine is dead")))
    assert isinstance(desk.heard[-1], EngineUnavailableError)
    assert desk.engine.back.is_set()
    desk.assert_tidy()


async def test_a_new_front_end_has_nothing_to_name() -> None:
    desk = Desk(state="loading", goes_on=True)
    assert not desk.engine.back.is_set()
    call = desk.come_back()
    assert call.operation == ComeBack([])
    desk.engine.take(call_result(call.id, []))
    assert desk.engine.back.is_set()
