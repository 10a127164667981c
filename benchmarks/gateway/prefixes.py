"""How much of what backends have cached is found again under each router: conversations over backends with prefix
caches of their own, beside one backend with the memory of all.

    python -m benchmarks.gateway.prefixes [--backends 4] [--conversations 256] [--at-once 32] [--turns 6] [--slack 1.25]

Each conversation begins with one of some system prompts, and each of its requests repeats all that was said before.
Some are under way at once; a new one begins when one is over. All caches together are `--slack` times as large as what
the conversations under way have in them at most. Backends are stand-ins with LRU caches of blocks of 64 characters;
their own counters say what they found.

hits: blocks of prompts found, of all looked up. of one: beside one backend with all memory. busiest: the most requests
that a backend had, of the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.gateway.processes import Gateway, backend_flags
from eventlm.server.scheduling import SESSION_HEADER
from eventlm.table import table
from tests.gateway.stub_backend import StubBackend

ROUTERS = ("prefix_affinity", "session_affinity", "round_robin", "pull", "least_loaded")
NUM_SYSTEM_PROMPTS = 8
SYSTEM_CHARACTERS, TURN_CHARACTERS = 2048, 384
ANSWER_TOKENS, CHARACTERS_PER_TOKEN = 64, 4
BLOCK_CHARACTERS = 64


class Workload(NamedTuple):
    """The conversations. at_once: how many are under way."""

    conversations: int
    at_once: int
    turns: int

    @property
    def num_blocks(self) -> int:
        """Blocks that those under way have at most."""
        grown = self.at_once * self.turns * (TURN_CHARACTERS + ANSWER_TOKENS * CHARACTERS_PER_TOKEN)
        return (NUM_SYSTEM_PROMPTS * SYSTEM_CHARACTERS + grown) // BLOCK_CHARACTERS


class Found(NamedTuple):
    """What the backends counted, over all of them. busiest: requests of the one that had most, of the mean."""

    queried: int
    hits: int
    busiest: float

    @property
    def rate(self) -> float:
        """Of the blocks looked up."""
        return self.hits / self.queried


async def converse(session: aiohttp.ClientSession, number: int, num_turns: int) -> None:
    """One conversation. The same number says the same. Raises SystemExit if a request fails."""
    rng = random.Random(number)
    system = _text(random.Random(f"system {rng.randrange(NUM_SYSTEM_PROMPTS)}"), SYSTEM_CHARACTERS)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}]
    for _ in range(num_turns):
        messages.append({"role": "user", "content": _text(rng, TURN_CHARACTERS)})
        body: dict[str, Any] = {"model": "stub", "messages": messages, "seed": 1}
        async with session.post("/v1/chat/completions", json=body, headers={SESSION_HEADER: str(number)}) as reply:
            if reply.status != 200:
                raise SystemExit(f"HTTP {reply.status}: {await reply.text()}")
            answer = await reply.json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def _text(rng: random.Random, num_characters: int) -> str:
    return rng.randbytes(num_characters // 2).hex()


async def measure(router: str, num_backends: int, cache_blocks: int, workload: Workload, folder: Path) -> Found:
    """Let all conversations pass through the gateway."""
    stubs = [
        StubBackend(
            num_tokens=ANSWER_TOKENS,
            tokens_per_chunk=8,
            first_delay=0.005,
            token_delay=0.002,
            cache_blocks=cache_blocks,
            block_characters=BLOCK_CHARACTERS,
        )
        for _ in range(num_backends)
    ]
    numbers = iter(range(workload.conversations))

    async def converse_on(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            await converse(session, number, workload.turns)

    async with AsyncExitStack() as stack:
        for stub in stubs:
            await stack.enter_async_context(stub)
        flags = backend_flags([stub.url for stub in stubs], workload.at_once)
        gateway = await asyncio.to_thread(Gateway, folder, *flags, "--router", router)
        try:
            async with aiohttp.ClientSession(gateway.urls[0]) as session, asyncio.TaskGroup() as tasks:
                for _ in range(workload.at_once):
                    tasks.create_task(converse_on(session))
        finally:
            await asyncio.to_thread(gateway.stop)
    requests = [len(stub.requests) for stub in stubs]
    return Found(
        sum(stub.queried_blocks for stub in stubs),
        sum(stub.hit_blocks for stub in stubs),
        max(requests) * len(stubs) / sum(requests),
    )


async def run(arguments: argparse.Namespace, folder: Path) -> Sequence[tuple[str, ...]]:
    """A row for one backend and for each router over several."""
    workload = Workload(arguments.conversations, arguments.at_once, arguments.turns)
    num_blocks = int(arguments.slack * workload.num_blocks)
    whole = await measure("pull", 1, num_blocks, workload, folder / "one")
    rows = [("one with all memory", f"{whole.rate:.1%}", "", "")]
    for router in arguments.routers:
        found = await measure(router, arguments.backends, num_blocks // arguments.backends, workload, folder / router)
        rows.append((router, f"{found.rate:.1%}", f"{found.rate / whole.rate:.3f}", f"{found.busiest:.2f}"))
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = (("backends", 4), ("conversations", 256), ("at-once", 32), ("turns", 6))
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slack", type=float, default=1.25)
    parser.add_argument("--routers", nargs="+", default=ROUTERS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run(arguments, Path(folder)))
    print("\n".join(table(("router", "hits", "of one", "busiest"), rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
