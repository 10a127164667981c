"""`eventlm serve` with the fake model: real processes, real sockets, the openai client, and what the trace says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from typing import Any

import openai
import pytest

from eventlm.events import Arrived, End, Finished, Launched, Rejected, TextEnded, WorkerLost, WorkerUp
from eventlm.worker.fake.runner import MILLION, draw
from tests.cli.conftest import StartServer
from tests.cli.serve.test_command_swarm import expected, random_request
from tests.cli.streams import Stream, going_on, until_all_have
from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.serving import fake_text, verified

SLOW = "base_ns=20000000"
#: Room for one context. All blocks are looked at after every event of the trace.
FEW_BLOCKS = ("--num-blocks", "600")


async def test_streams_equal_whole_replies_and_both_are_right(start_server: StartServer) -> None:
    limits = ["--max-num-batched-tokens", "64", "--max-num-seqs", "24", *FEW_BLOCKS]
    server = start_server("--model", "fake", "--replicas", "2", "--batcher", "dynamic", *limits)
    rng = random.Random(7)
    gate = asyncio.Semaphore(16)
    async with server.async_client() as client:

        async def one(fields: dict[str, Any]) -> None:
            async with gate:
                whole = await client.completions.create(model="fake", **fields)
                streamed = [""] * fields["n"]
                reasons = [""] * fields["n"]
                async for chunk in await client.completions.create(model="fake", stream=True, **fields):
                    [choice] = chunk.choices
                    streamed[choice.index] += choice.text
                    reasons[choice.index] = choice.finish_reason or ""
            wanted = [expected(fields, index) for index in range(fields["n"])]
            assert [(choice.text, choice.finish_reason) for choice in whole.choices] == wanted
            assert list(zip(streamed, reasons, strict=True)) == wanted

        await asyncio.gather(*(one(random_request(rng, seed)) for seed in range(24)))
    trace = server.stop_and_verify()
    assert set(trace.finish_reasons) == {"length", "stop"}
    assert len(trace.of(TextEnded)) >= trace.finish_reasons["stop"] > 10


async def test_clients_that_leave_free_everything_at_once(start_server: StartServer) -> None:
    server = start_server("--model", "fake")
    async with server.async_client() as client:
        streams = [
            Stream(
                client, model="fake", prompt=f"prompt {seed} " * 20, seed=seed, n=1, max_tokens=7900 if seed % 2 else 40
            )
            for seed in range(24)
        ]
        await asyncio.gather(*(stream.run(leave_after=10 if stream.seed % 2 else None) for stream in streams))
    assert all(stream.error is None for stream in streams)
    assert [stream.text for stream in streams[::2]] == [fake_text(seed, 40) for seed in range(0, 24, 2)]
    # Before the server stops, which would end them too.
    wait_until(lambda: len(verified(server.trace, check_invariants=False).of(Finished)) == 24)
    assert server.is_healthy()
    trace = server.stop_and_verify()
    assert len(trace.cancelled_by_clients) == 12
    assert trace.finish_reasons == {"length": 12, "cancelled": 12}


@pytest.mark.parametrize(
    ("router", "policy", "batcher"),
    [
        ("round_robin", "edf:multiplier=2,min_deadline_ms=300", "fixed"),
        ("pull", "lrs", "dynamic:target_ms=20"),
        pytest.param("least_loaded", "fcfs", "fixed", marks=pytest.mark.soak),
    ],
)
async def test_two_replicas_under_every_router_and_policy(
    start_server: StartServer, router: str, policy: str, batcher: str
) -> None:
    flags = ["--router", router, "--policy", policy, "--batcher", batcher]
    # Room for one sequence, so that of two that go on no router can leave a replica out.
    server = start_server("--model", "fake", "--replicas", "2", "--max-num-seqs", "1", *FEW_BLOCKS, *flags)
    async with server.async_client() as client:
        async with going_on(*(Stream(client, model="fake", prompt="hi", max_tokens=8000) for _ in range(2))):
            pass
        streams = [Stream(client, model="fake", prompt="hi", seed=seed, max_tokens=24) for seed in range(16)]
        await asyncio.gather(*(stream.run() for stream in streams))
    assert [stream.text for stream in streams] == [fake_text(seed, 24) for seed in range(16)]
    trace = server.stop_and_verify()
    header = trace.events[0]
    assert [plugin.name for plugin in header.plugins] == [spec.partition(":")[0] for spec in (policy, batcher, router)]
    assert {event.replica for event in trace.of(Launched)} == {0, 1}


async def test_a_policy_of_ones_own_in_the_working_directory(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from eventlm.core.plugin import Policy\n\n\n"
        "class ShortestFirst(Policy, frozen=True, kw_only=True):\n"
        '    """The shortest prompt goes first."""\n\n'
        "    scale: int = 1\n\n"
        "    def keys(self, sequences, now_ns):\n"
        "        return [self.scale * sequence.prompt_tokens for sequence in sequences]\n"
    )
    flags = ["--max-num-seqs", "1", "--policy", "my_policies:ShortestFirst:scale=3"]
    server = start_server("--model", "fake", *flags, files={"my_policies.py": code})
    async with server.async_client() as client:
        async with going_on(Stream(client, model="fake", prompt="x" * 50, max_tokens=8000)):
            lengths = [400, 100, 300, 200]
            streams = [Stream(client, model="fake", prompt="x" * length, max_tokens=4) for length in lengths]
            waiting = asyncio.gather(*(stream.run() for stream in streams))
            await asyncio.to_thread(wait_until, lambda: server.figure("vllm:num_requests_waiting") == 4)
        await waiting
    assert server.stop() == 0
    monkeypatch.syspath_prepend(server.folder)
    trace = verified(server.trace, trust_local_plugins=True)
    prompt_tokens = {event.s: event.prompt_tokens for event in trace.of(Arrived)}
    finished = [prompt_tokens[event.request] for event in trace.of(Finished)]
    assert finished == [51, 101, 201, 301, 401]
    assert trace.events[0].plugins[0].parameters == {"scale": 3}


async def test_a_killed_worker_costs_no_client_anything(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--replicas", "2", *FEW_BLOCKS)
    async with server.async_client() as client:
        streams = [
            Stream(client, model="fake", prompt=f"prompt {seed}", seed=seed, max_tokens=200) for seed in range(16)
        ]
        running = asyncio.gather(*(stream.run() for stream in streams))
        await until_all_have(streams, 20)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        await running
    for stream in streams:
        assert (stream.error, stream.finish_reason) == (None, "length")
        assert stream.text == fake_text(stream.seed, 200)
    wait_until(lambda: len(server.worker_pids) == 2 and server.is_healthy())
    server.log_event("worker is back")
    trace = server.stop_and_verify()
    assert len(trace.of(WorkerLost)) == 1
    assert len(trace.of(WorkerUp)) == 3
    assert trace.num_emitted() == {(seed, 0): 200 for seed in range(16)}


async def test_sigterm_lets_streams_end_and_leaves_an_end(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", SLOW)
    async with server.async_client() as client:
        stream = Stream(client, model="fake", prompt="hi", seed=1, max_tokens=60)
        running = asyncio.create_task(stream.run())
        await until_all_have([stream], 2)
        server.process.send_signal(signal.SIGTERM)
        ending = server.log_event("shutting down")
        assert (ending["num_requests"], ending["drain_seconds"]) == (1, 30)
        with pytest.raises(openai.APIError):
            await client.completions.create(model="fake", prompt="late")
        await running
    assert (stream.error, stream.text) == (None, fake_text(1, 60))
    assert server.process.wait(PATIENCE_SECONDS) == 0
    trace = verified(server.trace)
    assert trace.result.clean_end
    assert isinstance(trace.events[-1], End)


async def test_a_second_signal_ends_streams_too(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", SLOW)
    async with server.async_client() as client:
        stream = Stream(client, model="fake", prompt="hi", seed=1, max_tokens=8000)
        running = asyncio.create_task(stream.run())
        await until_all_have([stream], 2)
        server.process.send_signal(signal.SIGINT)
        server.log_event("shutting down")
        server.process.send_signal(signal.SIGINT)
        await running
    assert isinstance(stream.error, openai.APIError)
    assert "ended this request" in str(stream.error)
    logged = server.log_event("request")
    assert (logged["status"], logged["outcome"], logged["error_status"]) == (200, "cut", 503)
    assert server.process.wait(PATIENCE_SECONDS) == 0
    assert verified(server.trace).result.clean_end


async def test_after_kill_9_every_token_that_a_client_has_seen_is_in_the_trace(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--replicas", "2", *FEW_BLOCKS)
    workers = server.worker_pids
    async with server.async_client() as client:
        streams = [
            Stream(client, model="fake", prompt=f"prompt {seed}", seed=seed, max_tokens=8000) for seed in range(16)
        ]
        running = asyncio.gather(*(stream.run() for stream in streams))
        await until_all_have(streams, 40)
        server.process.kill()
        await running
    server.process.wait()
    wait_until(lambda: not any(map(is_running, workers)))
    trace = verified(server.trace)
    assert not trace.result.clean_end
    emitted = trace.num_emitted()
    for stream in streams:
        assert stream.error is not None
        seen = stream.text.encode()
        assert fake_text(stream.seed, 8000).encode().startswith(seen)
        # One token is one byte: what the client has seen was in the trace before.
        assert 40 <= len(seen) <= emitted[stream.seed, 0]


async def test_a_full_queue_is_a_429_with_retry_after(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", SLOW, "--max-num-seqs", "1", "--max-queue-len", "2")
    async with server.async_client() as client:
        async with going_on(Stream(client, model="fake", prompt="hi", max_tokens=8000)):
            others = [Stream(client, model="fake", prompt="hi", max_tokens=4) for _ in range(8)]
            waiting = asyncio.gather(*(stream.run() for stream in others))
            await asyncio.to_thread(wait_until, lambda: sum(stream.error is not None for stream in others) == 6)
        await waiting
    refused = [stream.error for stream in others if stream.error is not None]
    assert len(refused) == 6
    for error in refused:
        assert isinstance(error, openai.RateLimitError)
        assert (error.type, error.code) == ("requests", "rate_limit_exceeded")
        assert error.response.headers["retry-after"] == "1"
    trace = server.stop_and_verify()
    assert len(trace.of(Rejected)) == 6


async def test_the_clients_retries_get_through_a_full_queue(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--max-num-seqs", "1", "--max-queue-len", "1")
    async with server.async_client(max_retries=20) as client:
        texts = await asyncio.gather(
            *(client.completions.create(model="fake", prompt="hi", seed=seed, max_tokens=8) for seed in range(4))
        )
    assert [text.choices[0].text for text in texts] == [fake_text(seed, 8) for seed in range(4)]
    server.stop_and_verify()


def test_bad_input_is_answered_and_the_server_goes_on(start_server: StartServer) -> None:
    server = start_server("--model", "fake")
    as_json = {"Content-Type": "application/json"}
    replies = [
        (server.complete(prompt="x" * 9000), 400, "context_length_exceeded", "8192"),
        (server.complete(max_tokens=8192), 400, "context_length_exceeded", "8192"),
        (server.complete(prompt=""), 400, "invalid_value", "empty"),
        (server.complete(prompt=[]), 400, "invalid_value", "empty"),
        (server.complete(prompt=[5000]), 400, "invalid_value", "1023"),
        (server.complete(temperature="hot"), 400, "invalid_type", "temperature"),
        (server.complete(n=0), 400, "invalid_value", "n"),
        (server.complete(model="gpt-9"), 404, "model_not_found", "gpt-9"),
        (server.request("POST", "/v1/completions", b'{"prompt": "\xff"}', as_json), 400, None, "UTF-8"),
        (server.request("POST", "/v1/completions", b"{", as_json), 400, None, "JSON"),
        (server.request("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}), 415, None, "text/plain"),
        (server.request("GET", "/v1/completions"), 405, "method_not_supported", "GET"),
        (server.request("GET", "/v2"), 404, "unknown_url", "/v2"),
    ]
    for reply, status, code, part in replies:
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (status, code), error
        assert part in error["message"]
        assert reply.headers["x-request-id"]
    assert server.complete(seed=3).json()["choices"][0]["text"] == fake_text(3, 8)
    assert len(server.stop_and_verify().of(Arrived)) == 1


async def test_requests_whose_logits_are_not_finite_fail_and_the_others_go_on(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--fake", "nan_ppm=20000")
    failing = {seed: index for seed in range(24) if (index := first_nan(seed, 20_000)) < 30}
    assert 6 < len(failing) < 18
    async with server.async_client() as client:

        async def one(seed: int) -> None:
            fields: dict[str, Any] = {"model": "fake", "prompt": "hi", "seed": seed, "max_tokens": 30}
            stream = Stream(client, n=1, **fields)
            await stream.run()
            assert stream.text == fake_text(seed, failing.get(seed, 30))
            if seed not in failing:
                assert stream.error is None
                return
            assert stream.error is not None
            assert (stream.error.type, stream.error.code) == ("server_error", None)
            with pytest.raises(openai.InternalServerError) as raised:
                await client.completions.create(**fields)
            assert (raised.value.status_code, raised.value.type) == (500, "server_error")
            assert raised.value.response.headers["x-should-retry"] == "false"

        await asyncio.gather(*map(one, range(24)))
    warnings = [line for line in map(json.loads, server.stderr.splitlines()) if "NaN" in line["event"]]
    assert [line["level"] for line in warnings] == ["warning"] * (2 * len(failing))
    trace = server.stop_and_verify()
    assert trace.finish_reasons == {"error": 2 * len(failing), "length": 24 - len(failing)}


def first_nan(seed: int, nan_ppm: int) -> int:
    """The place in the output at which the fake model has no token for this seed."""
    return next(index for index in range(10_000) if draw("nan", seed, 0, index) % MILLION < nan_ppm)


def test_a_body_of_100_mb_is_refused_and_the_server_goes_on(start_server: StartServer) -> None:
    server = start_server("--model", "fake")
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(f"{head}Content-Length: 100000000\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    # One that sends it all in pieces, whatever is answered, may find the connection closed on the way.
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection,
    ):
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(100):
            connection.sendall(b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert server.complete(seed=3).json()["choices"][0]["text"] == fake_text(3, 8)
    server.stop_and_verify()


def test_without_a_worker_left_clients_get_an_error_and_the_trace_is_whole(start_server: StartServer) -> None:
    # Without --max-losses 0 the engine would blame the request.
    server = start_server("--model", "fake", "--fake", "die_ppm=1000000", "--max-restarts", "1", "--max-losses", "0")
    for part in ("no worker is left: died", "The engine has died"):
        reply = server.complete()
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert part in reply.json()["error"]["message"]
    assert not server.is_healthy()
    trace = server.stop_and_verify()
    assert len(trace.of(WorkerLost)) == len(trace.of(WorkerUp)) == 2
