"""The edge's side of a request: text ends told once, late tokens ignored, nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventlm.control.request import (
    ClosingOutput,
    EngineRequest,
    FinishedOutput,
    RequestHandle,
    TokensOutput,
)
from eventlm.sampler_params import SamplerParams
from eventlm.server.fake_tokenizer import FakeTokenizer
from eventlm.server.generation import Generation, submit

from .engine_double import EngineDouble, spell


class Wire:
    """A generation over one handle whose outputs the test puts."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        request = EngineRequest(
            model="test",
            prompt_token_ids=[1, 2, 3],
            params=SamplerParams(),
            stop=stop,
            has_text_ends=bool(stop),
        )
        self.told: list[tuple[int, int, int, str]] = []
        self.cancelled: list[tuple[int, str]] = []
        self.handle = RequestHandle(
            5, 1, lambda *told: self.told.append(told), lambda *args: self.cancelled.append(args)
        )
        self.generation = Generation(FakeTokenizer(), [request], [self.handle])

    async def read(self, *outputs: Any) -> str:
        for output in outputs:
            self.handle.put(output)
        return "".join([output.text async for output in self.generation.outputs()])


async def test_tokens_after_a_stop_are_ignored_and_the_end_is_told_once() -> None:
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


async def test_without_stops_nothing_is_told() -> None:
    wire = Wire()
    assert await wire.read(TokensOutput(0, 0, list(b"ab")), FinishedOutput(0, "eos", 2, 1)) == "ab"
    assert wire.told == []
    usage = wire.generation.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (3, 2, 1)
    wire.generation.cancel()
    assert wire.cancelled == []


async def test_cancel_reaches_what_is_not_over() -> None:
    wire = Wire()
    wire.generation.cancel("shutdown")
    assert wire.cancelled == [(5, "shutdown")]


async def test_a_cancelled_submit_leaves_nothing_behind() -> None:
    engine = EngineDouble(spell("Hello"))
    engine.submit_seconds = 0.02
    request = EngineRequest(model="test", prompt_token_ids=[1], params=SamplerParams())
    task = asyncio.create_task(submit(engine, FakeTokenizer(), [request, request]))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.submitted.wait()
    await asyncio.sleep(0)
    assert engine.cancelled == [(0, "client"), (1, "client")]
