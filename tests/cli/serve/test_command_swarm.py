"""Random servers under random load: workers die, clients leave, the pool is tight, and nobody gets a wrong text."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai
import pytest

from eventlm.events import Preempted, WorkerLost
from eventlm.worker.fake.tokens import WORDS
from tests.cli.conftest import StartServer
from tests.processes import PATIENCE_SECONDS
from tests.serving import fake_text
from tests.workload import BATCHERS, POLICIES


def random_flags(rng: random.Random) -> dict[str, int | str]:
    die_ppm = rng.choice([0, 2000, 10_000])
    return {
        "replicas": rng.choice([1, 2, 3]),
        "policy": rng.choice(POLICIES),
        "router": rng.choice(["pull", "round_robin", "least_loaded", "prefix_affinity"]),
        "batcher": rng.choice(BATCHERS),
        "num-blocks": rng.choice([50, 80, 200]),
        "max-num-seqs": 16,
        "max-num-batched-tokens": rng.choice([32, 128]),
        "max-steps-in-flight": rng.choice([1, 2, 3, 4]),
        "max-decodes-in-flight-per-seq": rng.choice([1, 2, 3]),
        "fake": f"base_ns=300000,late_ppm=10000,die_ppm={die_ppm}",
        "max-restarts": 50,
        "validate-every": 1,
        "checkpoint-events": 50,
    }


def random_request(rng: random.Random, seed: int) -> dict[str, Any]:
    """A request that fits the smallest pool."""
    words = [word.decode().strip() for word in WORDS]
    request: dict[str, Any] = {
        "prompt": " ".join(rng.choices(words, k=rng.randint(1, 60))),
        "seed": seed,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 150),
        "stop": rng.choice([None, None, rng.sample(words, 2), [rng.choice(words)[-3:]], ["é", "本"]]),
        "extra_body": {"priority": rng.randint(-2, 2)} if rng.random() < 0.3 else {},
    }
    if rng.random() < 0.3:
        request["extra_body"]["deadline_ms"] = rng.randint(1, 500)
    return request


def expected(request: dict[str, Any], index: int) -> tuple[str, str]:
    """Text and finish reason, from the definition of the fake model and of stop strings."""
    text = fake_text(request["seed"], request["max_tokens"], index=index)
    indices = [text.find(stop) for stop in request["stop"] or [] if stop in text]
    return (text[: min(indices)], "stop") if indices else (text, "length")


async def run_client(client: openai.AsyncOpenAI, request: dict[str, Any], *, leaves: bool) -> None:
    """Read a stream to its end and compare, or leave it after a few characters."""
    choices = [("", "")] * request["n"]
    async with await client.completions.create(model="fake", stream=True, **request) as chunks:
        async for chunk in chunks:
            [choice] = chunk.choices
            choices[choice.index] = (choices[choice.index][0] + choice.text, choice.finish_reason or "")
            if leaves and len(choices[0][0]) > 5:
                return
    assert choices == [expected(request, index) for index in range(request["n"])], request


async def run_swarm(start_server: StartServer, seed: int, *, num_clients: int) -> None:
    rng = random.Random(seed)
    flags = random_flags(rng)
    server = start_server("--model", "fake", *(str(word) for name in flags for word in (f"--{name}", flags[name])))
    clients = [(rng.random() * 2, random_request(rng, number), rng.random() < 0.2) for number in range(num_clients)]
    async with server.async_client() as client:

        async def one(delay: float, request: dict[str, Any], leaves: bool) -> None:
            await asyncio.sleep(delay)
            await run_client(client, request, leaves=leaves)

        # On a slow machine the starts of workers that died add up.
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            await asyncio.gather(*(one(*arguments) for arguments in clients))
    trace = server.stop_and_verify()
    assert trace.finish_reasons["error"] == 0
    print(f"{flags}: {dict(trace.finish_reasons)}, {trace.result.num_decisions} decisions")
    print(f"{len(trace.of(WorkerLost))} workers lost, {len(trace.of(Preempted))} preemptions")


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.soak), 5])
async def test_swarm(start_server: StartServer, seed: int) -> None:
    await run_swarm(start_server, seed, num_clients=24)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
async def test_swarm_for_longer(start_server: StartServer, seed: int) -> None:
    await run_swarm(start_server, seed, num_clients=120)
