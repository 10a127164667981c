"""Engines that are killed behind front ends: no client loses its connection, and every text is exact."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from eventlm.events import Arrived, Finished, Recovered
from tests.cli.serve.kept_front_ends import SLOW, OneConnection, ServerWithKeptFrontEnds
from tests.processes import is_running, until, wait_until
from tests.serving import Trace, fake_text, verified

NUM_STREAMS, NUM_WHOLE, MAX_TOKENS = 8, 4, 120


@contextmanager
def serving(folder: Path, *flags: str, **options: Any) -> Iterator[ServerWithKeptFrontEnds]:
    """A server that is ready, and leaves nothing."""
    folder.chmod(0o700)
    server = ServerWithKeptFrontEnds(folder, *flags, **options)
    try:
        yield server.wait_ready()  # type: ignore[misc]
    finally:
        processes = server.processes
        server.close()
        wait_until(lambda: not any(map(is_running, processes)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerWithKeptFrontEnds]:
    with serving(tmp_path, *SLOW) as server:
        yield server


def make_clients(server: ServerWithKeptFrontEnds, first_seed: int = 0) -> list[OneConnection]:
    seeds = range(first_seed, first_seed + NUM_STREAMS + NUM_WHOLE)
    return [
        OneConnection(server, seed, MAX_TOKENS, is_stream=number < NUM_STREAMS) for number, seed in enumerate(seeds)
    ]


def stopped(server: ServerWithKeptFrontEnds, num_recoveries: int) -> Trace:
    """End the server; what it has recorded."""
    assert server.stop() == 0, server.stderr
    trace = verified(server.trace.parent)
    assert len(trace.of(Recovered)) == num_recoveries
    assert trace.result.clean_end
    return trace


async def test_no_connection_is_lost_when_an_engine_is_killed_and_another_restarted(
    server: ServerWithKeptFrontEnds,
) -> None:
    front_ends = server.front_ends
    clients = make_clients(server)
    running = asyncio.gather(*(client.run() for client in clients))
    for number, end_engine in enumerate((server.kill_engine, lambda: server.process.send_signal(signal.SIGUSR2))):
        await until(lambda least=5 + 20 * number: all(len(each.text) > least for each in clients[:NUM_STREAMS]))
        end_engine()
        await asyncio.to_thread(server.wait_for, "ready", number + 2)
    await running
    for client in clients:
        client.check()
    assert server.front_ends == front_ends
    trace = stopped(server, 2)
    assert sorted(int(event.seed) for event in trace.of(Arrived)) == list(range(NUM_STREAMS + NUM_WHOLE))


async def test_no_connection_is_lost_when_limits_and_plugins_change(tmp_path: Path) -> None:
    config = tmp_path / "eventlm.toml"
    config.write_text("[scheduler]\nmax_num_seqs = 16\n")
    with serving(tmp_path, *SLOW, "--config", str(config)) as server:
        clients = make_clients(server)
        running = asyncio.gather(*(client.run() for client in clients))
        runs = [server.trace.parent.resolve()]
        settings = ("max_num_seqs = 4", "max_num_seqs = 4\npolicy = { type = 'edf' }")
        for number, changed in enumerate(settings, start=1):
            await until(lambda least=20 * number: sum(len(each.text) > least for each in clients) >= 4)
            config.write_text(f"[scheduler]\n{changed}\n")
            server.process.send_signal(signal.SIGUSR2)
            await asyncio.to_thread(server.wait_for, "ready", number + 1)
            runs.append(server.trace.parent.resolve())
        await running
        for client in clients:
            client.check()
        stopped(server, 1)
    traces = [verified(run) for run in runs]
    followed = [[(each.reason, each.run) for each in trace.of(Recovered)] for trace in traces]
    assert followed == [[], [("restart", runs[0].name)], [("restart", runs[1].name)]]
    assert sum(len(trace.of(Finished)) for trace in traces) == len(clients)


async def test_new_requests_wait_for_the_next_engine(server: ServerWithKeptFrontEnds) -> None:
    first = OneConnection(server, 1, MAX_TOKENS, is_stream=True)
    pieces: list[str] = []
    running = [asyncio.create_task(first.run()), asyncio.create_task(read_with_openai(server, pieces))]
    await until(lambda: first.text and pieces)
    server.kill_engine()
    replies = []
    while not replies or replies[-1].status == 200:
        replies.append(await asyncio.to_thread(server.request, "GET", "/health"))
    assert (replies[-1].status, replies[-1].json()["error"]["code"]) == (503, "recovering")
    assert "retry-after" in replies[-1].headers
    others = [OneConnection(server, seed, 8, is_stream=seed % 2 > 0) for seed in range(2, 8)]
    await asyncio.gather(*running, *(other.run() for other in others))
    for client in (first, *others):
        client.check()
    assert b": recovering" in first.comments
    assert "".join(pieces) == fake_text(9, MAX_TOKENS)
    assert server.is_healthy()
    stopped(server, 1)


async def read_with_openai(server: ServerWithKeptFrontEnds, pieces: list[str]) -> None:
    """Not every client reads comments as the standard has them."""
    async with server.async_client() as client:
        fields: dict[str, Any] = {"seed": 9, "max_tokens": MAX_TOKENS, "extra_body": {"ignore_eos": True}}
        async for chunk in await client.completions.create(model="fake", prompt="hi", stream=True, **fields):
            pieces += [choice.text for choice in chunk.choices]


async def test_a_dead_front_ends_resumable_requests_go_on(server: ServerWithKeptFrontEnds) -> None:
    clients = make_clients(server)
    running = [asyncio.create_task(client.run()) for client in clients]
    await until(lambda: all(len(each.text) > 5 for each in clients[:NUM_STREAMS]))
    server.kill_front_end()
    await come_back(server, clients, running)
    trace = stopped(server, 0)
    assert len(trace.of(Arrived)) == len(clients)
    num_cut = sum(not client.is_whole for client in clients)
    assert sum(trace.finish_reasons[reason] for reason in ("cancelled", "front_end_lost")) == num_cut


async def test_an_engine_and_a_front_end_die_at_once(server: ServerWithKeptFrontEnds) -> None:
    clients = make_clients(server)
    running = [asyncio.create_task(client.run()) for client in clients]
    await until(lambda: all(len(each.text) > 5 for each in clients[:NUM_STREAMS]))
    server.kill_engine()
    server.kill_front_end()
    await asyncio.to_thread(server.wait_for, "ready", 2)
    await come_back(server, clients, running)
    assert len(server.front_ends) == 2
    trace = stopped(server, 1)
    assert len(trace.of(Arrived)) == len(clients)


@pytest.mark.soak
@pytest.mark.parametrize("num_kills", [50, 1000])
async def test_many_kills_of_the_engine_under_load(tmp_path: Path, num_kills: int) -> None:
    with serving(tmp_path, "--fake", "base_ns=5000000", standby_seconds=0.5, max_deaths=10**6) as server:
        front_ends, chance, is_over, num_replies = server.front_ends, random.Random(num_kills), False, 0

        async def visit(seed: int) -> None:
            nonlocal num_replies
            while not is_over:
                client = OneConnection(server, seed, MAX_TOKENS, is_stream=seed % 3 > 0)
                await client.run()
                client.check()
                num_replies += 1
                seed += NUM_STREAMS + NUM_WHOLE

        running = asyncio.gather(*(visit(seed) for seed in range(NUM_STREAMS + NUM_WHOLE)))
        for number in range(num_kills):
            await asyncio.sleep(chance.random() * 1.5)
            assert not running.done(), running.exception()
            server.kill_engine()
            await asyncio.to_thread(server.wait_for, "ready", number + 2)
        is_over = True
        await running
        assert server.front_ends == front_ends
        trace = stopped(server, num_kills)
        assert len(trace.of(Arrived)) == num_replies


@pytest.mark.soak
@pytest.mark.parametrize("num_kills", [50, 500])
async def test_many_kills_of_engine_and_front_ends_under_load(tmp_path: Path, num_kills: int) -> None:
    with serving(tmp_path, "--fake", "base_ns=5000000", standby_seconds=0.5, max_deaths=10**6) as server:
        chance, is_over, num_whole, num_recoveries = random.Random(num_kills), False, 0, 0

        async def visit(seed: int) -> None:
            nonlocal num_whole
            while not is_over:
                client = OneConnection(server, seed, MAX_TOKENS, is_stream=seed % 3 > 0)
                with suppress(OSError, IndexError):
                    await client.run()
                while client.reply_id and not client.is_whole:
                    with suppress(OSError, IndexError):
                        await client.resume()
                    assert client.status in (200, 204, 503)
                if client.is_whole:
                    client.check()
                    num_whole += 1
                seed += NUM_STREAMS + NUM_WHOLE

        running = asyncio.gather(*(visit(seed) for seed in range(NUM_STREAMS + NUM_WHOLE)))
        for _ in range(num_kills):
            await asyncio.sleep(chance.random() * 1.5)
            assert not running.done(), running.exception()
            kind = chance.random()
            if kind < 0.7:
                num_recoveries += 1
                server.kill_engine()
            if kind > 0.5:
                server.kill_front_end()
            await asyncio.to_thread(server.wait_for, "ready", num_recoveries + 1)
        is_over = True
        await running
        trace = stopped(server, num_recoveries)
        seeds = [event.seed for event in trace.of(Arrived)]
        assert len(set(seeds)) == len(seeds) >= num_whole > num_kills


async def come_back(
    server: ServerWithKeptFrontEnds, clients: list[OneConnection], running: list[asyncio.Task[None]]
) -> None:
    """Whoever has lost the connection to a stream comes back for its rest. What was asked for without streaming is
    lost.
    """
    await asyncio.wait(running)
    lost = [client for client, task in zip(clients, running, strict=True) if task.exception() or not client.is_whole]
    for client in lost:
        if client.is_stream:
            await client.resume()
    for client in clients:
        if client.is_whole or client.is_stream:
            client.check()
