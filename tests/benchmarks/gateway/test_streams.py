"""The backend and the client of the gateway's benchmarks, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from benchmarks.gateway.backend import Connection, Port, make_answer
from benchmarks.gateway.streams import run
from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import AnswerDelta, AnswerEnd, Attempt, ForwardedRequest
from eventlm.gateway.client import HttpBackend


@asynccontextmanager
async def backend(port: Port) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    async with await loop.create_server(partial(Connection, port), "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("token_seconds", [0.0, 0.002])
async def test_every_token_is_counted(token_seconds: float) -> None:
    port = Port(make_answer(5, 0.02, token_seconds))
    async with backend(port) as url:
        found = await run(url, num_streams=3, num_requests=7, num_tokens=5, ramp_seconds=0.01)
    assert (found.num_tokens, found.failures) == (35, [])
    assert len(found.ttft_ms) == 7
    assert min(found.ttft_ms) >= 19
    assert port.num_running == 0


async def test_answers_that_are_not_whole_are_failures() -> None:
    async with backend(Port(make_answer(5, 0.0, 0.0))) as url:
        found = await run(url, num_streams=1, num_requests=2, num_tokens=6, ramp_seconds=0.0)
    assert (found.num_tokens, found.failures) == (0, ["5 tokens, not 6"] * 2)


async def test_the_gateway_takes_it_for_vllm_and_reads_all_of_it() -> None:
    async with backend(Port(make_answer(5, 0.0, 0.0))) as url:
        client = HttpBackend(BackendSpec(url=url))
        try:
            assert (await client.ask()).kind == "vllm"
            load = await client.read_load()
            assert load is not None
            assert (load.running, load.waiting) == (0, 0)
            request = ForwardedRequest(endpoint="chat", body=b'{"messages":[]}')
            attempt = Attempt(request=request, seed=1, request_id="r", first_seconds=10, silence_seconds=10)
            parts = [part async for part in client.forward(attempt)]
        finally:
            await client.close()
    deltas = [part for part in parts if isinstance(part, AnswerDelta)]
    assert "".join(delta.text for delta in deltas) == "".join(f" ~{i:04}" for i in range(5))
    assert sum(delta.num_tokens for delta in deltas) == 5
    assert isinstance(parts[-1], AnswerEnd)
    assert parts[-1].usage.completion == 5
