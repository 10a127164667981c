"""What the log says of each request: enough to find it in the trace, and nothing of its content."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import wait_until
from tests.server.conftest import RunningServer, capture_logs


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_request(server: RunningServer, stream: bool) -> None:
    assert server.chat().status == 200
    with capture_logs() as logs:
        server.post(
            "/v1/chat/completions",
            {"model": "test", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": stream},
            {"x-request-id": "mine"},
        )
        # The line of the request before may come late.
        [line] = wait_until(lambda: [dict(line) for line in logs if line["request_id"] == "mine"])
    assert line.pop("duration_ms") >= line.pop("ttft_ms") >= 0
    assert line == {
        "event": "request",
        "log_level": "info",
        "request_id": "mine",
        # What the engine double calls its second request.
        "seq": 1,
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "prompt_tokens": 21,
        "cached_tokens": 4,
        "output_tokens": 24,
        "finish_reason": "eos",
        "choices": 2,
    }


def test_a_request_that_never_got_to_the_engine(server: RunningServer) -> None:
    with capture_logs() as logs:
        server.chat()
        server.chat(temperature=9)
        server.request("GET", "/v1/models")
        wait_until(lambda: len(logs) == 3)
    assert [("seq" in line, "output_tokens" in line) for line in logs] == [(True, True), (False, False), (False, False)]
    assert len({line["request_id"] for line in logs}) == 3


def test_a_path_cannot_write_to_a_terminal(server: RunningServer) -> None:
    with capture_logs() as logs:
        server.request("GET", "/x%1b%5B2J%0aline/%c3%a9?key=canary")
        for path in (b"/\x1b[2J", b"/\xe9", b"/\x9b2J", b"http://x/\x1b"):
            server.raw(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").recv(4096)
        wait_until(lambda: len(logs) == 5)
    for line in logs:
        path = line.get("path", "")
        assert path.isascii()
        assert path.isprintable()
    assert logs[0]["path"] == "/x%1b%5B2J%0aline/%c3%a9"


def test_keep_alive_does_not_mix_requests(server: RunningServer) -> None:
    import openai

    with capture_logs() as logs, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        replies = [client.completions.with_raw_response.create(model="test", prompt="hi") for _ in range(2)]
        client.models.list()
        wait_until(lambda: len(logs) == 3)
    assert [line["request_id"] for line in logs[:2]] == [reply.headers["x-request-id"] for reply in replies]
    assert [line.get("seq") for line in logs] == [0, 1, None]


@pytest.mark.parametrize("stream", [False, True])
def test_defects_are_logged_with_their_request(server: RunningServer, stream: bool, monkeypatch: Any) -> None:
    def fail(*_: Any) -> bytes:
        raise ValueError("broken")

    monkeypatch.setattr(server.context.tokenizer, "token_bytes", fail)
    with capture_logs() as logs:
        assert server.chat(stream=stream, messages=[{"role": "user", "content": "hi"}]).status == 500
        wait_until(lambda: len(logs) == 2)
    failed, line = logs
    assert failed["event"] == "a request failed"
    assert failed["request_id"] == line["request_id"]
    assert (failed["seq"], line["seq"], line["log_level"]) == (0, 0, "warning")
