"""Limits as clients see them: headers on every reply, and a 429 that says when to come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.server.errors import format_duration
from tests.server.auth.test_api_keys import bearer, write
from tests.server.conftest import RunningServer, assert_error

LIMITED = """
[[keys]]
name = "alice"
key = "sk-alice"
limits = { requests_per_minute = 3, tokens_per_minute = 300 }

[[keys]]
name = "bob"
key = "sk-bob"
"""


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (120_000_000, "120ms"),
        (1_000_000_000, "1s"),
        (1_500_000_000, "1.5s"),
        (59_999_999_999, "1m0s"),
        (360_000_000_000, "6m0s"),
        (90_250_000_000, "1m30.25s"),
    ],
)
def test_durations_are_written_as_openai_does(duration_ns: int, text: str) -> None:
    assert format_duration(duration_ns) == text


@pytest.fixture
def limited(start_server: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    return start_server(api_keys_file=str(write(tmp_path / "keys.toml", LIMITED)))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/generate", {"prompt": "hi", "raw": True}),
        ("/completion", {"prompt": ["hi", "ho"], "n_cmpl": 2}),
    ],
)
def test_a_dialect_s_default_is_cut_to_the_limit(limited: RunningServer, path: str, fields: dict[str, Any]) -> None:
    limited.engine.max_model_len = 4096
    assert limited.post(path, {"model": "test", **fields}, bearer("sk-alice")).status == 200
    group = limited.engine.requests
    used = sum(len(request.prompt_token_ids) + request.n * request.max_tokens for request in group)
    assert 300 - sum(request.n for request in group) < used <= 300
    # Who asks for more gets the error.
    options = {"n_predict": 1000, "options": {"num_predict": 1000}}
    assert limited.post(path, {"model": "test", **fields, **options}, bearer("sk-alice")).status == 429


def test_headers_and_the_429(limited: RunningServer) -> None:
    body = {"model": "test", "prompt": "hi", "max_tokens": 10}
    for number in range(3):
        stream = number == 1
        reply = limited.post("/v1/completions", body | {"stream": stream}, bearer("sk-alice"))
        assert reply.status == 200
        assert (reply.headers["content-type"] == "text/event-stream; charset=utf-8") == stream
        headers = {name: reply.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")}
        assert headers == {"limit": "3", "remaining": str(2 - number)}
        assert reply.headers["x-ratelimit-limit-tokens"] == "300"
        assert 300 - 13 * (number + 1) <= int(reply.headers["x-ratelimit-remaining-tokens"]) <= 287 + number
        assert reply.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = limited.post("/v1/completions", body, bearer("sk-alice"))
    assert_error(refused, 429, "requests", None, "rate_limit_exceeded", message="3 requests per minute")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in refused.headers
    assert len(limited.engine.requests) == 3
    reply = limited.post("/v1/completions", body, bearer("sk-bob"))
    assert reply.status == 200
    assert not any(name.startswith("x-ratelimit") for name in reply.headers)


def test_what_can_never_fit_is_not_retried(limited: RunningServer) -> None:
    refused = limited.post("/v1/completions", {"model": "test", "prompt": "a" * 200, "n": 4}, bearer("sk-alice"))
    assert_error(refused, 429, "tokens", None, "rate_limit_exceeded", message="300 tokens per minute")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    with (
        openai.OpenAI(base_url=f"{limited.url}/v1", api_key="sk-alice", max_retries=2) as client,
        pytest.raises(openai.RateLimitError) as raised,
    ):
        client.completions.create(model="test", prompt="a" * 200, n=4)
    assert raised.value.type == "tokens"


def test_a_request_that_is_wrong_costs_nothing(limited: RunningServer) -> None:
    for _ in range(9):
        body = {"model": "test", "prompt": "x", "temperature": 9}
        assert limited.post("/v1/completions", body, bearer("sk-alice")).status == 400
    reply = limited.post("/v1/completions", {"model": "test", "prompt": "hi", "max_tokens": 1}, bearer("sk-alice"))
    assert reply.headers["x-ratelimit-remaining-requests"] == "2"


def test_each_resumption_of_a_stream_counts_as_a_request(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    server = start_server(api_keys_file=str(write(tmp_path / "keys.toml", LIMITED)), resume_seconds=30)
    alice, bob = bearer("sk-alice"), bearer("sk-bob")
    body = {"model": "test", "prompt": "x", "max_tokens": 5, "stream": True}
    server.post("/v1/completions", body, alice | {"x-request-id": "mine"})
    for _ in range(2):
        assert server.request("GET", "/v1/stream/mine", headers=alice).data.endswith(b"[DONE]\n\n")
    refused = server.request("GET", "/v1/stream/mine", headers=alice)
    assert_error(refused, 429, "requests", None, "rate_limit_exceeded", "3 requests per minute")
    assert int(refused.headers["retry-after"]) in range(1, 21)
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    # Nobody else's, and an id that does not exist counts too.
    assert server.request("GET", "/v1/stream/mine", headers=bob).status == 404
    assert server.request("GET", "/v1/stream/none", headers=alice).status == 429
