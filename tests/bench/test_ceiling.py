"""The null server, and what the client makes of it."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.bench import ceiling
from eventlm.bench.load import Endpoint
from eventlm.client.openai_client import OpenAIClient
from eventlm.errors import EventLMError
from tests.processes import is_running


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_the_null_server_streams_what_is_asked_for(endpoint: Endpoint) -> None:
    async with ceiling._null_server() as url, OpenAIClient(url) as client:
        stream = client.stream_chat if endpoint == "chat" else client.stream_completion
        for max_tokens in (1, 31, 32, 33, 500):
            deltas = [delta async for delta in stream({"max_tokens": max_tokens, "prompt": "x" * 100_000})]
            assert sum(delta.text == " word" for delta in deltas) == max_tokens
            assert deltas[-1].finish_reason == "length"


async def test_ceiling() -> None:
    assert await ceiling.measure_ceiling("completions", num_streams=4, seconds=0.1) > 0


async def test_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    start = asyncio.create_subprocess_exec

    async def remembering(*arguments: str, **settings: object) -> asyncio.subprocess.Process:
        process = await start(*arguments, **settings)  # type: ignore[arg-type]
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remembering)
    with pytest.raises(ZeroDivisionError):
        async with ceiling._null_server():
            raise ZeroDivisionError
    [pid] = pids
    assert not is_running(pid)


async def test_a_null_server_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling.sys, "executable", "/bin/true")
    with pytest.raises(EventLMError, match="did not start"):
        await ceiling.measure_ceiling("completions")
