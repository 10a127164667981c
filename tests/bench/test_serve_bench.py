"""A whole load test against a small server that keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from eventlm.bench import serve_bench
from eventlm.bench.ceiling import measure_ceiling
from eventlm.bench.draws import parse_lengths
from eventlm.bench.ranks import Ranks
from eventlm.bench.serve_bench import ServeBench, ServeOptions, ServeResult
from eventlm.client.errors import ClientError
from eventlm.client.openai_client import OpenAIClient
from eventlm.errors import UsageError
from tests.bench.byte_server import ByteServer
from tests.client.scripted import replying, scripted_server


def options(url: str, **fields: Any) -> ServeOptions:
    lengths = {
        "input_lengths": parse_lengths(fields.pop("input_len", "100"), "--input-len"),
        "output_lengths": parse_lengths(fields.pop("output_len", "4"), "--output-len"),
    }
    return ServeOptions(**({"url": url, "measures_ceiling": False, "num_prompts": 5} | lengths | fields))


async def bench(server: ByteServer, **fields: Any) -> ServeResult:
    async with scripted_server(server.handle) as url, OpenAIClient(url) as client:
        load = ServeBench(options(url, **fields), client, Ranks())
        await load.prepare(lambda phase: None)
        return await load.run(asyncio.Event(), lambda record: None)


async def test_lengths_as_the_server_counts_them() -> None:
    server = ByteServer("m")
    result = await bench(server)
    assert len(server.bodies) == 2 + 5
    assert {server.size(body) for body in server.bodies[:2]} == {64 * 5 - 1, 192 * 5 - 1}
    assert all(record.prompt_tokens in range(97, 103) for record in result.load.records)
    assert {body["max_tokens"] for body in server.bodies[2:]} == {4}


async def test_a_chat_has_its_template_on_top() -> None:
    server = ByteServer("m")
    result = await bench(server, endpoint="chat")
    assert result.endpoint == "chat"
    assert all(record.prompt_tokens in range(106, 112) for record in result.load.records)


async def test_a_given_tokenizer_needs_no_request_to_the_server() -> None:
    server = ByteServer("m")
    result = await bench(server, tokenizer="fake")
    assert len(server.bodies) == 5
    # The fake tokenizer puts a token before a prompt, which this server does not.
    assert {record.prompt_tokens for record in result.load.records} == {99}


async def test_equal_seeds_send_equal_bodies() -> None:
    shape = {"input_len": "uniform:min=20,max=90", "output_len": "uniform:min=1,max=9", "request_rate": 500.0}
    bodies = []
    for seed in (1, 1, 2):
        server = ByteServer("m")
        result = await bench(server, seed=seed, prefix_tokens=30, num_prefixes=2, **shape)
        intended = [record.intended_ns for record in result.load.records]
        bodies.append((intended, sorted(json.dumps(body) for body in server.bodies)))
    assert bodies[0] == bodies[1]
    assert bodies[0][0] != bodies[2][0]
    assert bodies[0][1] != bodies[2][1]


async def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n50.00,60,3\n50.02,70,5\n50.01,80,4\n")
    server = ByteServer("m")
    result = await bench(server, trace=str(path), tokenizer="fake", num_prompts=0)
    assert [record.intended_ns for record in result.load.records] == [0, 10_000_000, 20_000_000]
    assert {(server.size(body), body["max_tokens"]) for body in server.bodies} == {(59, 3), (79, 4), (69, 5)}


async def test_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"one"}],"max_tokens":2}\n{"prompt":"two"}\n')
    server = ByteServer("m")
    result = await bench(server, dataset=str(path), num_prompts=0, max_concurrency=1, num_warmups=1)
    assert result.endpoint == "chat"
    said = [(body["messages"][0]["content"], body["max_tokens"]) for body in server.bodies]
    assert said == [("two", 4), ("one", 2), ("two", 4)]
    assert len(result.load.records) == 2


async def test_warmups_are_no_part_of_the_load() -> None:
    server = ByteServer("m")
    result = await bench(server, tokenizer="fake", num_warmups=3)
    assert len(server.bodies) == 3 + 5
    assert len(result.load.records) == 5
    assert len({body["prompt"] for body in server.bodies}) == 8


async def test_the_model() -> None:
    assert (await bench(ByteServer("a", "b"))).model == "a"
    assert (await bench(ByteServer("a", "b"), model="b")).model == "b"
    with pytest.raises(UsageError, match=r"--model bb is not served .*; did you mean bbb\? Served: aaa, bbb"):
        await bench(ByteServer("aaa", "bbb"), model="bb")


async def test_a_server_without_a_list_of_models() -> None:
    assert (await bench(ByteServer(), model="b")).model == "b"
    with pytest.raises(ClientError, match="no such thing"):
        await bench(ByteServer())


async def test_a_server_that_does_not_count() -> None:
    with pytest.raises(UsageError, match="does not say how many tokens a prompt has; give --tokenizer"):
        await bench(ByteServer("m", counts=False))
    result = await bench(ByteServer("m", counts=False), tokenizer="fake")
    assert [record.prompt_tokens for record in result.load.records] == [100] * 5


async def test_a_warm_up_that_fails() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return await ByteServer("m").handle(request)
        return await replying(400, '{"error":{"message":"no"}}')(request)

    async with scripted_server(handle) as url, OpenAIClient(url) as client:
        load = ServeBench(options(url, tokenizer="fake", num_warmups=1), client, Ranks())
        with pytest.raises(ClientError, match=r"a warm-up request failed: .* HTTP 400: no"):
            await load.prepare(lambda phase: None)


async def test_the_ceiling_is_measured_with_the_streams_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    async def measure(endpoint: str, *, num_streams: int) -> float:
        asked.append((endpoint, num_streams))
        return await measure_ceiling("completions", num_streams=num_streams, seconds=0.1)

    monkeypatch.setattr(serve_bench, "measure_ceiling", measure)
    result = await bench(ByteServer("m"), tokenizer="fake", measures_ceiling=True, max_concurrency=2)
    assert asked == [("completions", 2)]
    assert result.ceiling_tokens_per_second is not None
    assert result.ceiling_tokens_per_second > 0


async def test_a_load_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="--duration needs"):
        await bench(ByteServer("m"), duration_s=1.0, num_prompts=0)
