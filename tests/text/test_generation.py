"""The edge's side of a request: text ends told once, late tokens ignored, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from msgspec import structs

from eventlm.engine.backend import AnswerDelta, AnswerUsage, ForwardedRequest
from eventlm.engine.request import (
    ClosingOutput,
    EngineUnavailableError,
    FinishedOutput,
    PooledOutput,
    PromptLogprobsOutput,
    Request,
    RequestHandle,
    Submission,
    TextOutput,
    TokensOutput,
)
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.text.choice_output import ChoiceOutput, join_outputs
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.generation import Generation, UsageCounts, resume, submit
from eventlm.text.output_queue import OutputQueue, TakenOverError
from tests.made_requests import make_request
from tests.server.engine_double import EngineDouble, spell, spell_logprobs


class Wire:
    """A generation over one handle whose outputs the test puts."""

    def __init__(
        self,
        stop: tuple[str, ...] = (),
        params: SamplingParams | None = None,
        *,
        is_forwarded: bool = False,
        **fields: Any,
    ) -> None:
        params = structs.replace(params or SamplingParams(), stop=list(stop))
        request = make_request([1, 2, 3], params, **{"model": "test", "has_text_ends": bool(stop)} | fields)
        if is_forwarded:
            request = structs.replace(request, forwarded=ForwardedRequest(endpoint="chat", body=b"{}"))
        self.told: list[tuple[int, int, int, str]] = []
        self.cancelled: list[tuple[int, str]] = []
        self.handle = RequestHandle(
            5, 1, lambda *told: self.told.append(told), lambda *args: self.cancelled.append(args)
        )
        self.outputs = OutputQueue()
        self.generation = Generation(FakeTokenizer(), [request], [self.handle], self.outputs, now_ns=time.monotonic_ns)

    async def read(self, *outputs: Any) -> str:
        return (await self.read_all(*outputs)).text

    async def read_all(self, *outputs: Any) -> ChoiceOutput:
        for output in outputs:
            self.outputs.put(0, output)
        return join_outputs([output async for output in self.generation.outputs()])


async def test_tokens_after_a_stop_are_ignored_and_the_end_is_reported_once() -> None:
    wire = Wire(stop=("lo",))
    text = await wire.read(
        TokensOutput(0, 0, list(b"hel")),
        TokensOutput(0, 3, list(b"lo")),
        TokensOutput(0, 5, list(b"lo and more")),
        ClosingOutput(0, "eos", 16),
        FinishedOutput(0, "stop", 5, 0),
    )
    assert text == "hel"
    assert wire.told == [(5, 0, 5, "stop")]


async def test_texts_of_a_backend_need_no_tokenizer() -> None:
    wire = Wire(is_forwarded=True)
    output = await wire.read_all(
        TextOutput(0, 0, AnswerDelta("größ", 2, token_ids=[900_000, 7])),
        TextOutput(0, 2, AnswerDelta("er", 1, reasoning="hm", embedding=b"1234")),
        FinishedOutput(0, "stop_token", 3, 2, stop_reason=7),
    )
    assert (output.text, output.token_ids, output.embedding, output.stop_reason) == ("größer", [900_000, 7], b"1234", 7)
    assert output.delta == AnswerDelta("größer", 3, "hm", token_ids=[900_000, 7], embedding=b"1234")
    assert (output.num_tokens, wire.generation.num_tokens) == (3, 3)
    assert wire.generation.token_counts() == UsageCounts(3, 3, 2, None)
    assert wire.generation.first_token_ns
    assert wire.told == []


async def test_a_backends_own_counts_are_taken() -> None:
    wire = Wire(is_forwarded=True)
    usage = AnswerUsage(prompt=11, completion=5, cached=8, reasoning=4)
    output = await wire.read_all(TextOutput(0, 0, AnswerDelta("a", 1)), FinishedOutput(0, "eos", 1, 2, usage=usage))
    assert wire.generation.token_counts() == wire.generation.token_counts_of(output) == UsageCounts(11, 5, 8, 4)


async def test_closing_is_answered_when_nothing_was_found() -> None:
    wire = Wire(stop=("xyz",))
    text = await wire.read(
        TokensOutput(0, 0, list(b"abxy")), ClosingOutput(0, "length", 4), FinishedOutput(0, "length", 4, 0)
    )
    assert text == "abxy"
    assert wire.told == [(5, 0, 4, "")]


async def test_a_stop_in_the_last_incomplete_character() -> None:
    wire = Wire(stop=("�",))
    text = await wire.read(
        TokensOutput(0, 0, [97, 0xC3]), ClosingOutput(0, "length", 2), FinishedOutput(0, "stop", 2, 0)
    )
    assert text == "a"
    assert wire.told == [(5, 0, 2, "stop")]


async def test_tokens_and_logprobs_end_with_the_output() -> None:
    wire = Wire(stop=("lo",))
    output = await wire.read_all(
        TokensOutput(0, 0, list(b"he"), spell_logprobs(b"he", 2)),
        TokensOutput(0, 2, list(b"llo and"), spell_logprobs(b"llo and", 2)),
        TokensOutput(0, 9, list(b"more"), spell_logprobs(b"more", 2)),
        FinishedOutput(0, "stop", 5, 0),
    )
    assert (output.text, bytes(output.token_ids), output.stop_reason) == ("hel", b"hello", "lo")
    assert output.logprobs == spell_logprobs(b"hello", 2)
    assert output.finished == FinishedOutput(0, "stop", 5, 0)
    assert wire.generation.num_tokens == 5


@pytest.mark.parametrize(
    ("fields", "reason", "text", "stop_reason"),
    [
        ({}, "stop_token", "ab", 33),
        ({"include_stop_str_in_output": True}, "stop_token", "ab!", 33),
        ({"include_stop_str_in_output": True}, "eos", "ab!", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "stop_token", "ab!", 33),
    ],
)
async def test_a_stop_token_is_an_output_token(
    fields: dict[str, Any], reason: Any, text: str, stop_reason: int | None
) -> None:
    wire = Wire(params=SamplingParams(stop_token_ids=[33], **fields))
    output = await wire.read_all(TokensOutput(0, 0, list(b"ab!")), FinishedOutput(0, reason, 3, 0))
    assert (output.text, bytes(output.token_ids), output.stop_reason) == (text, b"ab!", stop_reason)


async def test_special_tokens_can_be_shown() -> None:
    wire = Wire(params=SamplingParams(ignore_eos=True, skip_special_tokens=False))
    output = await wire.read_all(TokensOutput(0, 0, [97, 257]), FinishedOutput(0, "length", 2, 0))
    assert output.text == "a<|eos|>"


async def test_prompt_logprobs_come_once_however_often_they_are_computed() -> None:
    wire = Wire()
    parts = [(1, b"a"), (1, b"abc"), (2, b"b"), (3, b"cde"), (6, b"f")]
    outputs = []
    for start, piece in parts:
        logprobs = spell_logprobs(piece, 1)
        assert logprobs is not None
        outputs.append(PromptLogprobsOutput(0, start, logprobs))
    output = await wire.read_all(*outputs, TokensOutput(0, 0, [97]), FinishedOutput(0, "length", 1, 0))
    assert output.prompt_logprobs == spell_logprobs(b"abcdef", 1)


async def test_a_request_without_tokens() -> None:
    wire = Wire(kind="pool")
    output = await wire.read_all(PooledOutput(0, b"12345678"), FinishedOutput(0, "complete", 0, 0))
    assert (output.embedding, output.text, output.token_ids) == (b"12345678", "", [])
    assert output.finished is not None
    assert output.finished.reason == "complete"


async def test_without_stops_nothing_is_reported() -> None:
    wire = Wire()
    assert await wire.read(TokensOutput(0, 0, list(b"ab")), FinishedOutput(0, "eos", 2, 1)) == "ab"
    assert wire.told == []
    assert wire.generation.token_counts() == UsageCounts(prompt=3, completion=2, cached=1, reasoning=None)
    wire.generation.cancel()
    assert wire.cancelled == []


async def test_cancel_reaches_what_is_not_over() -> None:
    wire = Wire()
    wire.generation.cancel("shutdown")
    assert wire.cancelled == [(5, "shutdown")]


async def test_a_failure_after_admission_leaves_no_request_behind() -> None:
    engine = EngineDouble(spell("Hello"))
    engine.keep(seconds=60)
    engine.step_seconds = 30
    request = Request(prompt_token_ids=[1], sampling=SamplingParams(), scheduling=SchedulingParams(model="test"))
    submission = Submission(reply_id="r", is_resumable=True)
    broken: Any = object()
    with pytest.raises(AttributeError):
        await submit(engine, broken, [request], submission)
    assert engine.cancelled == [(0, "client")]
    assert engine.registry.find("r", "").readers == {}
    with pytest.raises(AttributeError):
        await resume(engine, broken, "r", "")
    assert engine.registry.find("r", "").readers == {}


async def test_much_at_once_is_taken_with_pauses() -> None:
    """Others have something to say while a long reply is read again."""
    wire = Wire(params=SamplingParams(max_tokens=1_000))
    num_turns = 0

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        asyncio.get_running_loop().call_soon(turn)

    turn()
    outputs = [TokensOutput(0, index, [120]) for index in range(640)]
    assert await wire.read(*outputs, FinishedOutput(0, "length", 640, 0)) == "x" * 640
    assert num_turns > 8


async def test_who_was_taken_over_from_keeps_nothing() -> None:
    """Else each of many who read a long reply again, and do not take what they asked for, has a copy of it."""
    engine = EngineDouble(spell("Hello"))
    engine.keep(seconds=60)
    request = Request(prompt_token_ids=[1], sampling=SamplingParams(), scheduling=SchedulingParams(model="test"))
    first = await submit(engine, FakeTokenizer(), [request], Submission(reply_id="r", is_resumable=True))
    while not first.is_over:
        await first.take()
    _, second = await resume(engine, FakeTokenizer(), "r", "")
    assert len(second._outputs) == 6
    await resume(engine, FakeTokenizer(), "r", "")
    with pytest.raises(TakenOverError):
        await second.take()
    assert len(second._outputs) == 0


async def test_of_what_has_failed_nothing_more_is_awaited() -> None:
    outputs = OutputQueue()
    request = Request(prompt_token_ids=[1], sampling=SamplingParams(), scheduling=SchedulingParams(model="test"))
    generation = Generation(FakeTokenizer(), [request] * 3, [], outputs, now_ns=time.monotonic_ns)
    outputs.put(0, FinishedOutput(0, "length", 0, 0))
    await generation.take()
    for index in (1, 2):
        assert not generation.is_over
        outputs.put(index, EngineUnavailableError("the engine has died"))
        with pytest.raises(EngineUnavailableError):
            await generation.take()
    assert generation.is_over


async def test_a_cancelled_submit_leaves_nothing_behind() -> None:
    engine = EngineDouble(spell("Hello"))
    engine.submit_seconds = 0.02
    request = Request(prompt_token_ids=[1], sampling=SamplingParams(), scheduling=SchedulingParams(model="test"))
    task = asyncio.create_task(submit(engine, FakeTokenizer(), [request, request]))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.submitted.wait()
    await asyncio.sleep(0)
    assert engine.cancelled == [(0, "client"), (1, "client")]
