"""`eventlm serve --backend` in front of servers that die, stall and refuse: real sockets and the openai client. Every
request that can be served is, once and whole, and the trace verifies.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import openai
import pytest

from eventlm.events import Finished, Forwarded, ForwardFailed, RetrySet
from tests.cli.conftest import StartServer
from tests.gateway.stub_backend import StubBackend, chat_prompt, reply_text
from tests.gateway.stub_faults import Fault
from tests.processes import until

NUM_REQUESTS = 60
NUM_TOKENS = 24
FLAGS = (
    "--forward-retries", "6", "--retry-backoff-ms", "10", "--retry-budget-percent", "100", "--probe-interval-ms", "50",
    "--silence-timeout-seconds", "1", "--max-failures", "4", "--backend-cache-tokens", "4096",
)  # fmt: skip


async def stream_chat(client: openai.AsyncOpenAI, number: int) -> str:
    messages: Any = [{"role": "user", "content": f"question {number}"}]
    text = ""
    stream = await client.chat.completions.create(model="stub", messages=messages, seed=number, stream=True)
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    assert text == reply_text(chat_prompt(messages), number, NUM_TOKENS)
    return text


async def test_one_dies_one_stalls_and_one_refuses_a_tenth(start_server: StartServer) -> None:
    kind: Any = {"kind": "vllm", "num_tokens": NUM_TOKENS, "token_delay": 0.01}
    async with StubBackend(**kind) as dying, StubBackend(**kind) as stalling, StubBackend(**kind) as refusing:
        stalling.faults = [Fault("stall", every=6, after=5)]
        refusing.faults = [
            Fault("status", every=10, status=429, retry_after="0.05"), Fault("status", every=11, status=500),
        ]  # fmt: skip
        urls = [each.url for each in (dying, stalling, refusing)]
        server = await asyncio.to_thread(start_server, *(part for url in urls for part in ("--backend", url)), *FLAGS)
        client = server.async_client(max_retries=0)
        chance = random.Random(1)

        async def ask(number: int) -> None:
            await asyncio.sleep(chance.random())
            await stream_chat(client, number)

        async def kill() -> None:
            await until(lambda: dying.num_completed >= 3 and dying.num_running > 0)
            await dying.stop()
            await asyncio.sleep(1)
            await dying.start()

        await asyncio.gather(kill(), *(ask(number) for number in range(NUM_REQUESTS)))
        trace = await asyncio.to_thread(server.stop_and_verify)
    assert Counter(each.reason for each in trace.of(Finished)) == {"stop": NUM_REQUESTS}
    kinds = Counter(each.kind for each in trace.of(ForwardFailed))
    assert {"broken", "timeout", "overloaded", "server"} <= kinds.keys(), kinds
    assert len(trace.of(Forwarded)) == NUM_REQUESTS + len(trace.of(RetrySet))


async def test_what_cannot_go_on_is_told_and_never_shown_twice(start_server: StartServer) -> None:
    """Proper OpenAI servers cannot go on from half an answer."""
    async with (
        StubBackend("openai", num_tokens=NUM_TOKENS) as cutting,
        StubBackend("openai", num_tokens=NUM_TOKENS) as whole,
    ):
        cutting.faults = [Fault("cut", after=3)]
        server = await asyncio.to_thread(
            start_server, "--backend", cutting.url, "--backend", whole.url, "--router", "round_robin", *FLAGS
        )
        client = server.async_client(max_retries=0)
        outcomes = await asyncio.gather(*(stream_chat(client, number) for number in range(8)), return_exceptions=True)
        failed = [each for each in outcomes if isinstance(each, BaseException)]
        assert 0 < len(failed) < 8
        assert all(isinstance(each, openai.APIError) for each in failed), failed
        await asyncio.to_thread(server.stop_and_verify)


@pytest.mark.parametrize("status", [400, pytest.param(422, marks=pytest.mark.soak)])
async def test_a_refusal_reaches_the_client_as_it_was_said(start_server: StartServer, status: int) -> None:
    async with StubBackend("vllm") as stub:
        body = '{"error": {"message": "no such grammar", "type": "BadRequestError", "param": "guided", "code": "x"}}'
        stub.faults = [Fault("status", status=status, body=body)]
        server = await asyncio.to_thread(start_server, "--backend", stub.url, *FLAGS)
        client = server.async_client(max_retries=0)
        with pytest.raises(openai.APIStatusError, match="no such grammar") as caught:
            await stream_chat(client, 1)
        assert caught.value.status_code == status
        assert len(stub.requests) == 1
        await asyncio.to_thread(server.stop_and_verify)


async def test_a_client_that_leaves_frees_its_backend(start_server: StartServer) -> None:
    async with StubBackend("vllm", num_tokens=1000, token_delay=0.02) as stub:
        server = await asyncio.to_thread(start_server, "--backend", stub.url, *FLAGS)
        client = server.async_client(max_retries=0)
        stream = await client.completions.create(model="stub", prompt="hi", max_tokens=1000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: not stub.num_running)
        assert stub.num_cancelled == 1
        await asyncio.to_thread(server.stop_and_verify)
