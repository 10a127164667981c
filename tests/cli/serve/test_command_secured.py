"""`eventlm serve` with keys, limits and an operator: real processes, one counter whichever of them answers."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai

from eventlm.events import CacheFlushed, Cancelled, Paused, PolicySwapped, Resumed
from tests.cli.conftest import StartServer
from tests.cli.streams import Stream, until_all_have
from tests.processes import wait_until
from tests.serving import Server

SLOW = "base_ns=20000000"
KEYS = """
[[keys]]
name = "alice"
key = "canary-alice"
limits = { requests_per_minute = 3 }

[[keys]]
name = "ops"
key = "canary-ops"
scopes = ["inference", "admin"]
"""


def write_keys(folder: Path, text: str) -> str:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


async def burst(server: Server, key: str, number: int) -> Counter[int]:
    """Statuses of so many requests at once, over many connections. Refusals say when to come back."""
    async with server.async_client(api_key=key) as client:

        async def one(seed: int) -> int:
            try:
                await client.completions.create(model="fake", prompt="hi", max_tokens=2, seed=seed)
            except openai.APIStatusError as error:
                return error.status_code if "retry-after" in error.response.headers else 0
            return 200

        return Counter(await asyncio.gather(*(one(seed) for seed in range(number))))


def who_reloaded(server: Server) -> set[int]:
    """The front ends that have read the file of keys again."""
    lines = [json.loads(line) for line in server.stderr.splitlines() if "API keys reloaded" in line]
    return {line["front_end"] for line in lines}


async def test_limits_are_counted_once_for_all_front_ends(start_server: StartServer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, KEYS)
    server = start_server("--model", "fake", "--api-servers", "2", "--api-keys-file", keys)
    assert await burst(server, "canary-alice", 30) == {200: 3, 429: 27}
    assert await burst(server, "canary-ops", 15) == {200: 15}
    write_keys(tmp_path, KEYS.replace("requests_per_minute = 3", "").replace("canary-ops", "canary-new"))
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: who_reloaded(server) == {1, 2})
    assert await burst(server, "canary-alice", 15) == {200: 15}
    ops = {"Authorization": "Bearer canary-new"}
    status = server.request("GET", "/admin/status", headers=ops).json()
    assert (status["state"], status["num_requests"]) == ("ready", 0)
    # Whichever front end is asked, all of them hear of it.
    assert server.request("POST", "/admin/drain", headers=ops).json()["state"] == "draining"
    wait_until(lambda: not any(server.is_healthy() for _ in range(8)))
    assert server.request("POST", "/admin/resume", headers=ops).json()["state"] == "ready"
    wait_until(lambda: all(server.is_healthy() for _ in range(8)))
    assert server.request("POST", "/admin/requests/1/abort", headers=ops).status == 404
    trace = server.stop_and_verify()
    assert trace.finish_reasons == {"length": 33}
    assert "canary" not in server.stderr
    assert "canary" not in server.trace.read_text()


async def test_an_operator_at_work(start_server: StartServer, tmp_path: Path) -> None:
    flags = ["--api-keys-file", write_keys(tmp_path, KEYS), "--extra-policy", "lrs", "--extra-policy", "edf"]
    server = start_server("--model", "fake", "--fake", SLOW, *flags)
    ops = {"Authorization": "Bearer canary-ops", "Content-Type": "application/json"}

    def do(path: str, body: bytes = b"") -> Any:
        reply = server.request("POST", f"/admin/{path}", body, ops)
        assert reply.status == 200, reply.data
        return reply.json()

    async with server.async_client(api_key="canary-ops") as client:
        streams = [Stream(client, model="fake", prompt=f"prompt {seed}", seed=seed, max_tokens=8000) for seed in (1, 2)]
        running = [asyncio.create_task(stream.run()) for stream in streams]
        await until_all_have(streams, 2)
        assert do("policy", b'{"policy": "lrs"}')["policy"] == "lrs"
        assert do("pause")["paused"]
        assert do("cache/flush")["num_requests"] == 2
        assert not do("resume")["paused"]
        assert do("drain")["state"] == "draining"
        assert server.request("GET", "/health").status == 503
        assert server.complete().status == 401
        late = server.request("POST", "/v1/completions", b'{"model": "fake", "prompt": "x"}', ops)
        assert (late.status, late.json()["error"]["type"]) == (503, "server_error")
        await until_all_have(streams, 5)
        status = do("resume")
        assert (status["state"], status["num_requests"]) == ("ready", 2)
        for stream in streams:
            do(f"requests/{stream.id}/abort")
        await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(stream.error, openai.APIError) for stream in streams)
    assert server.is_healthy()
    trace = server.stop_and_verify()
    found = [type(event) for event in trace.of(PolicySwapped, Paused, CacheFlushed, Resumed)]
    assert found == [PolicySwapped, Paused, CacheFlushed, Resumed]
    assert [event.reason for event in trace.of(Cancelled)] == ["admin", "admin"]
    actions = [line for line in server.stderr.splitlines() if '"event": "admin"' in line or '"event":"admin"' in line]
    assert len(actions) == 8
    assert all('"ops"' in line for line in actions)
