"""Beam search against a server process whose HTTP is in a front end of its own."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from pathlib import Path
from typing import Any

from eventlm.bus.log_reader import LogReader
from eventlm.events import Arrived
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.auth.test_api_keys import write
from tests.serving import Server, serve

KEYS = """
[[keys]]
name = "limited"
key = "sk-limited"
[keys.limits]
requests_per_minute = 100
tokens_per_minute = 100000
concurrent_requests = 2

[[keys]]
name = "operator"
key = "sk-operator"
scopes = ["inference", "admin"]
"""
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer sk-limited"}


def search_body(server: Server, **fields: Any) -> bytes:
    body = {"model": server.model, "prompt": "Once upon a time, long ago", "use_beam_search": True, "n": 3, "seed": 7}
    return json.dumps(body | fields).encode()


def search(server: Server, **fields: Any) -> Any:
    return server.request("POST", "/v1/completions", search_body(server, **fields), HEADERS)


def is_idle(server: Server) -> bool:
    running = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(server.figure(name) for name in running)


def test_a_search_is_recorded_as_ordinary_requests_and_ends_with_its_client(tmp_path: Path) -> None:
    write(tmp_path / "keys.toml", KEYS)
    flags = ("--model", "fake", "--fake", "base_ns=5000000", "--api-servers", "1", "--api-keys-file", "keys.toml")
    with serve(tmp_path, *flags, "--block-size", "4") as server:
        reply = search(server, max_tokens=24, eventlm={"timings": True}, request_id="search-1")
        assert reply.status == 200, reply.data
        found = reply.json()
        assert len(found["choices"]) == 3
        assert found["usage"]["completion_tokens"] <= 3 * 24
        assert [each["index"] for each in found["eventlm"]["timings"]] == [0, 1, 2]
        assert reply.headers["x-ratelimit-remaining-requests"] == "99"
        status = server.request("GET", "/v1/requests/search-1", headers=HEADERS).json()
        assert (status["id"], status["state"]) == (found["id"], "finished")
        assert [each["index"] for each in status["choices"]] == [0, 1, 2]
        assert status["branches"] > 3
        # It counts once, however many requests it consists of.
        assert server.figure("vllm:prompt_tokens_total") == found["usage"]["prompt_tokens"]
        assert server.figure("vllm:request_success_total") == 1
        assert server.figure("vllm:request_prompt_tokens_count") == 1
        assert server.figure("vllm:prefix_cache_hits_total") > 0
        again = search(server, max_tokens=24)
        assert [each["text"] for each in again.json()["choices"]] == [each["text"] for each in found["choices"]]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        # More than the key may have at once, so each of them must end when its client leaves.
        for _ in range(3):
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
            connection.request("POST", "/v1/completions", search_body(server, max_tokens=500), HEADERS)
            wait_until(lambda: server.figure("vllm:num_requests_running") == 3)
            connection.close()
            wait_until(lambda: is_idle(server))
        assert search(server, max_tokens=2).status == 200
    # It has verified. What one search submits refers to its first request.
    with LogReader(server.trace) as lines:
        arrivals = [event for line in lines if isinstance(event := line.event(), Arrived)]
    parents = Counter(event.scheduling.parent for event in arrivals)
    assert set(parents) - {0} <= {event.s for event in arrivals if not event.scheduling.parent}
    assert parents[0] == 6
