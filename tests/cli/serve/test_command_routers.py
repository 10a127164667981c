"""Shared prompts before several servers with small caches: what a router leaves of the hits of one large cache."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from tests.cli.conftest import StartServer
from tests.gateway.stub_backend import StubBackend

NUM_BACKENDS, NUM_PROMPTS, NUM_REQUESTS = 4, 8, 96
#: Of 64 characters, of which a prompt has ten and each request one more. A backend's cache holds two or three prompts.
CACHE_BLOCKS = 32
WORD = "{:08x}"


def conversations() -> list[list[dict[str, str]]]:
    """Requests in a random order, each with one of the shared prompts."""
    draw = Random(7)
    prompts = ["".join(WORD.format(draw.getrandbits(32)) for _ in range(80)) for _ in range(NUM_PROMPTS)]
    order = [number % NUM_PROMPTS for number in range(NUM_REQUESTS)]
    draw.shuffle(order)
    tail = 8 * WORD
    texts = [prompts[each] + tail.format(*range(8 * at, 8 * at + 8)) for at, each in enumerate(order)]
    return [[{"role": "user", "content": text}] for text in texts]


async def hit_rate(start_server: StartServer, router: str, *, num_backends: int = NUM_BACKENDS) -> float:
    """Found blocks of those that all backends have looked up."""
    async with AsyncExitStack() as stack:
        cache_blocks = CACHE_BLOCKS * NUM_BACKENDS // num_backends
        stubs = [
            await stack.enter_async_context(StubBackend("vllm", cache_blocks=cache_blocks, max_model_len=512))
            for _ in range(num_backends)
        ]
        flags = [flag for stub in stubs for flag in ("--backend", stub.url)]
        server = await asyncio.to_thread(start_server, *flags, "--router", router, "--no-record")
        client = server.async_client()
        room = asyncio.Semaphore(8)

        async def ask(messages: Any) -> None:
            async with room:
                await client.chat.completions.create(model="stub", messages=messages, max_tokens=2)

        await asyncio.gather(*map(ask, conversations()))
        await asyncio.to_thread(server.stop)
        return sum(stub.hit_blocks for stub in stubs) / sum(stub.queried_blocks for stub in stubs)


async def test_prefixes_are_found_where_they_were_sent(start_server: StartServer) -> None:
    best = await hit_rate(start_server, "pull", num_backends=1)
    found = await hit_rate(start_server, "prefix_affinity")
    in_turn = await hit_rate(start_server, "round_robin")
    assert found >= 0.9 * best
    assert in_turn < 0.7 * best
