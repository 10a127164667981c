"""`eventlm serve --api-servers N`: real front-end processes, kills, drains, and what the trace says."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eventlm.events import Arrived, Cancelled, Finished, FrontEndLost, WorkerLost
from tests.cli.conftest import StartServer
from tests.cli.serve.test_command_swarm import expected, random_request
from tests.cli.streams import Stream, until_all_have
from tests.processes import PATIENCE_SECONDS, children, is_running, wait_until
from tests.serving import Server

NUM_REQUESTS = 20
SLOW = "base_ns=20000000"
#: Of a stream that ends after two seconds.
NUM_TOKENS = 100


def front_end_pids(server: Server) -> list[int]:
    """Process ids of its front ends."""

    def is_front_end(pid: int) -> bool:
        try:
            return b"eventlm.cli.serve.front_end" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            return False

    return [pid for pid in children(server.process.pid) if is_front_end(pid)]


def log_lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]


def figures(server: Server) -> dict[tuple[str, str], float]:
    """Samples of /metrics by name and front end."""
    text = server.request("GET", "/metrics").data.decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name, sample.labels.get("front_end", "")): sample.value
        for family in families
        for sample in family.samples
    }


def num_up(server: Server) -> int:
    return sum(int(value) for (name, _), value in figures(server).items() if name == "eventlm:front_end_up")


async def run_load(server: Server) -> dict[int, list[tuple[str, str]]]:
    """A seeded load: texts and reasons of every request, by its seed."""
    rng = random.Random(11)
    gate = asyncio.Semaphore(16)
    found: dict[int, list[tuple[str, str]]] = {}
    async with server.async_client() as client:

        async def one(fields: dict[str, Any]) -> None:
            async with gate:
                choices = [("", "")] * fields["n"]
                async for chunk in await client.completions.create(model="fake", stream=True, **fields):
                    [choice] = chunk.choices
                    choices[choice.index] = (choices[choice.index][0] + choice.text, choice.finish_reason or "")
            assert choices == [expected(fields, index) for index in range(fields["n"])]
            found[fields["seed"]] = choices

        await asyncio.gather(
            *(one(random_request(rng, seed) | {"max_tokens": rng.randint(1, 60)}) for seed in range(NUM_REQUESTS))
        )
    return found


async def test_the_outcomes_are_the_same_however_many_front_ends_there_are(start_server: StartServer) -> None:
    outcomes = []
    for num_front_ends in (0, 2):
        server = start_server("--model", "fake", "--fake", "base_ns=300000", "--api-servers", str(num_front_ends))
        assert len(front_end_pids(server)) == num_front_ends
        texts = await run_load(server)
        trace = server.stop_and_verify()
        arrivals = {event.s: event for event in trace.of(Arrived)}
        ends = Counter(
            (int(arrivals[event.request].seed), event.index, event.reason, event.position)
            for event in trace.of(Finished)
        )
        outcomes.append((texts, ends))
        assert {event.scheduling.front_end for event in arrivals.values()} <= (
            {0} if not num_front_ends else set(range(1, num_front_ends + 1))
        )
        if num_front_ends == 2:
            assert {event.scheduling.front_end for event in arrivals.values()} == {1, 2}
    assert outcomes[0] == outcomes[1]


async def test_a_killed_front_end_takes_its_own_requests_with_it_and_no_others(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", SLOW, "--api-servers", "2", "--validate-every", "1")
    async with server.async_client() as client:
        streams = [
            Stream(client, model="fake", prompt=f"prompt {seed}", seed=seed, max_tokens=NUM_TOKENS)
            for seed in range(16)
        ]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await until_all_have(streams, 3)
        pid = front_end_pids(server)[0]
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*running)
        cut = [stream for stream in streams if stream.error is not None]
        assert 0 < len(cut) < len(streams)
        assert all(stream.text == expected_text(stream) for stream in streams if stream.error is None)
        # A new process takes its place, under its number.
        wait_until(lambda: len(set(front_end_pids(server)) - {pid}) == 2)
        wait_until(lambda: all(figures(server)["eventlm:front_end_up", str(number)] for number in (1, 2)))
        again = await asyncio.gather(
            *(Stream(client, model="fake", prompt="again", seed=seed, max_tokens=8).run() for seed in range(12))
        )
        assert all(stream.error is None for stream in again)
    samples = figures(server)
    assert sorted(samples["eventlm:front_end_restarts_total", str(number)] for number in (1, 2)) == [0, 1]
    [lost] = [line for line in log_lines(server) if line["event"] == "front end lost"]
    assert lost["pid"] == pid
    assert lost["reason"] == "died (killed by SIGKILL)"
    trace = server.stop_and_verify()
    requests = [line for line in log_lines(server) if line["event"] == "request" and "seq" in line]
    assert all(line["request_id"].startswith("req-") for line in requests)
    numbers = {event.s: event.scheduling.front_end for event in trace.of(Arrived)}
    assert len(requests) > 12
    assert all(line["front_end"] == numbers[line["seq"]] for line in requests)
    [fact] = trace.of(FrontEndLost)
    assert fact.front_end == lost["front_end"]
    first = {event.s: event for event in trace.of(Arrived) if int(event.seed) < len(streams) and event.s < fact.s}
    its_own = {seq for seq, event in first.items() if event.scheduling.front_end == fact.front_end}
    assert {int(first[seq].seed) for seq in its_own} == {stream.seed for stream in cut}
    reasons = {event.request: event.reason for event in trace.of(Finished)}
    assert all(reasons[seq] == ("front_end_lost" if seq in its_own else "length") for seq in first)
    assert not trace.of(Cancelled)


def expected_text(stream: Stream) -> str:
    return expected({"seed": stream.seed, "max_tokens": NUM_TOKENS, "stop": None}, 0)[0]


async def test_sigterm_lets_streams_of_all_front_ends_end_and_a_second_signal_ends_them(
    start_server: StartServer,
) -> None:
    server = start_server("--model", "fake", "--fake", SLOW, "--api-servers", "2", "--drain-seconds", "600")
    async with server.async_client() as client:
        streams = [
            Stream(client, model="fake", prompt="hi", seed=seed, max_tokens=8000 if seed % 2 else NUM_TOKENS)
            for seed in range(16)
        ]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await until_all_have(streams, 3)
        # As init systems and process managers do: to everybody.
        for pid in front_end_pids(server):
            os.kill(pid, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert server.log_event("shutting down")["num_requests"] == 16
        assert wait_until(lambda: server.complete().status) == 503
        await asyncio.gather(*running[::2])
        server.process.send_signal(signal.SIGINT)
        await asyncio.gather(*running)
    assert [stream.finish_reason for stream in streams[::2]] == ["length"] * 8
    assert all("ended this request" in str(stream.error) for stream in streams[1::2])
    trace = server.stop_and_verify()
    assert trace.finish_reasons == {"length": 8, "cancelled": 8}
    assert {event.reason for event in trace.of(Cancelled)} == {"shutdown"}
    assert not trace.of(FrontEndLost)


async def test_front_ends_have_the_address_alone_and_end_with_the_engines_process(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", SLOW, "--api-servers", "2")
    pids = front_end_pids(server)
    # The address is the server's alone, although its front ends share it.
    port = server.url.rpartition(":")[2]
    second = start_server("--model", "fake", "--api-servers", "2", "--port", port, wait=False)
    assert second.process.wait(PATIENCE_SECONDS) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
    assert "Traceback" not in second.stderr
    async with server.async_client() as client:
        streams = [Stream(client, model="fake", prompt="hi", seed=seed, max_tokens=8000) for seed in range(4)]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await until_all_have(streams, 3)
        server.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*running)
    assert all(stream.error is not None for stream in streams)
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.soak
async def test_many_kills_under_load_leave_nothing_behind(start_server: StartServer) -> None:
    num_kills, rng = 25, random.Random(5)
    server = start_server("--model", "fake", "--fake", "base_ns=1000000", "--api-servers", "3", "--validate-every", "4")
    done = asyncio.Event()
    outcomes: Counter[str] = Counter()

    async def run_client(client: openai.AsyncOpenAI, number: int) -> None:
        seed = number * 100_000
        while not done.is_set():
            seed += 1
            fields: Any = {"seed": seed, "max_tokens": rng.randint(1, 200), "stop": None}
            stream = await Stream(client, model="fake", prompt="x" * rng.randint(1, 300), **fields).run()
            if stream.error is None:
                assert (stream.text, stream.finish_reason) == expected(fields, 0)
            else:
                assert isinstance(stream.error, openai.APIError), stream.error
            outcomes["cut" if stream.error else "whole"] += 1

    async with server.async_client() as client:
        clients = [asyncio.create_task(run_client(client, number)) for number in range(24)]
        for _ in range(num_kills):
            await asyncio.sleep(rng.uniform(0, 1.0))
            # Most of those that die are up, a few are starting.
            while await asyncio.to_thread(num_up, server) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            os.kill(rng.choice(front_end_pids(server)), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV]))
        done.set()
        await asyncio.gather(*clients)
    assert outcomes["cut"] > num_kills < outcomes["whole"]
    wait_until(lambda: all(figures(server)["eventlm:front_end_up", str(number)] for number in (1, 2, 3)))
    samples = figures(server)
    assert [samples[f"vllm:{name}", ""] for name in ("num_requests_running", "num_requests_waiting")] == [0, 0]
    assert samples["vllm:kv_cache_usage_perc", ""] == 0
    trace = server.stop_and_verify()
    # One that dies while it starts has nothing to lose.
    assert num_kills // 2 < len(trace.of(FrontEndLost)) <= num_kills
    assert not trace.of(WorkerLost)
