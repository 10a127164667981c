"""Every reply is in the log with its tokens, also one that its client did not wait for."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.processes import wait_until
from tests.server.conftest import RunningServer, capture_logs


def test_a_reply_that_goes_on_without_its_client_is_in_the_log(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f"[[keys]]\nname = 'ann'\nsha256 = '{sha256(b'secret').hexdigest()}'\n")
    keys.chmod(0o600)
    server = start_server(api_keys_file=str(keys), resume_seconds=60)
    body = {"model": "test", "input": "hi", "background": True}
    with capture_logs() as logs:
        reply = server.post("/v1/responses", body, {"Authorization": "Bearer secret", "X-Request-Id": "mine"})
        assert reply.status == 200
        [line] = wait_until(lambda: _replies(logs))
    assert line.pop("duration_ms") >= line.pop("ttft_ms") >= 0
    assert line == {
        "event": "reply",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/responses",
        "key": "ann",
        "request_id": "mine",
        "seq": 0,
        "prompt_tokens": len(server.engine.requests[0].prompt_token_ids),
        "output_tokens": 12,
        "cached_tokens": 4,
        "finish_reason": "eos",
    }


def test_the_log_says_how_a_reply_without_its_client_was_cut(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    server.engine.script_end = "error"
    with capture_logs() as logs:
        server.post("/v1/responses", {"model": "test", "input": "hi", "background": True})
        [line] = wait_until(lambda: _replies(logs))
    assert (line["log_level"], line["outcome"], line["error_status"]) == ("warning", "cut", 500)


def test_a_stream_whose_client_may_come_back_is_in_the_log(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=60)
    server.engine.most_said = 5
    with capture_logs() as logs:
        with server.raw(_stream(b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}')) as connection:
            assert connection.recv(100)
        wait_until(lambda: server.context._read_on)
        server.engine.most_said = 1000
        [line] = wait_until(lambda: _replies(logs))
    assert (line["path"], line["output_tokens"]) == ("/v1/chat/completions", 12)


def _stream(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _replies(logs: list[Any]) -> list[Any]:
    return [dict(line) for line in logs if line["event"] == "reply"]
