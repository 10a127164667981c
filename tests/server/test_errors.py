"""The error table, row by row over a real socket (bodies and fields: see test_protocol and test_validation)."""

from __future__ import annotations

from typing import Any

import openai
import pytest
import structlog

from eventlm.engine.request import (
    ContextLengthError,
    EngineUnavailableError,
    GroupSizeError,
    QueueFullError,
    RequestFieldError,
    TokenIdError,
)
from eventlm.errors import CheckpointError
from eventlm.server.errors import api_error
from tests.processes import PATIENCE_SECONDS
from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves


def test_unknown_model(server: RunningServer) -> None:
    assert_error(server.chat(model="gpt-9"), 404, INVALID, "model", "model_not_found", message="gpt-9")
    assert_error(server.request("GET", "/v1/models/gpt-9"), 404, INVALID, "model", "model_not_found")


@pytest.mark.parametrize("path", ["//", "/v2/models", "/v1", "/v1/chat", "/v1/images", "/%00%ff", "/v1/models/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_path(server: RunningServer, method: str, path: str) -> None:
    assert_error(server.request(method, path), 404, INVALID, None, "unknown_url", message=method)


def test_wrong_method(server: RunningServer) -> None:
    for method, path in [("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health")]:
        reply = server.request(method, path)
        assert_error(reply, 405, INVALID, None, "method_not_supported", message=method)
        assert reply.headers["allow"]


def test_key(start_server) -> None:
    server = start_server(api_key="sésame")
    for headers, code in [
        ({}, None),
        ({"Authorization": "Basic x"}, None),
        ({"Authorization": "Bearer no"}, "invalid_api_key"),
        ({"x-api-key": "no"}, "invalid_api_key"),
        ({"x-api-key": " "}, None),
        ({"Authorization": "Bearer no", "x-api-key": "sésame".encode().decode("latin-1")}, "invalid_api_key"),
    ]:
        for path in ("/v1/models", "/v1/nowhere"):
            reply = server.request("GET", path, headers=headers)
            assert_error(reply, 401, INVALID, None, code)
    sent = "sésame".encode().decode("latin-1")
    for headers in (
        {"Authorization": f"Bearer {sent}"},
        {"x-api-key": sent},
        {"Authorization": "Bearer ", "x-api-key": sent},
    ):
        assert server.request("GET", "/v1/models", headers=headers).status == 200
    assert server.request("GET", "/health").status == 200


def test_content_type(server: RunningServer) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert_error(server.request("POST", "/v1/completions", b"{}", headers), 415, INVALID)
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.request("POST", "/v1/completions", b'{"model":"test","prompt":"x"}', headers).status == 200


def test_engine_errors(server: RunningServer) -> None:
    server.engine.submit_error = QueueFullError("the queue is full: 1024 sequences wait")
    reply = server.chat(stream=True)
    assert_error(reply, 429, "requests", None, "rate_limit_exceeded", message="The queue is full: 1024 sequences wait.")
    assert int(reply.headers["retry-after"]) >= 1
    # What never fits is not worth another try.
    server.engine.submit_error = GroupSizeError("it asks for 9 sequences at once")
    reply = server.complete()
    assert_error(reply, 400, INVALID, "prompt", "invalid_value", message="9 sequences")
    assert "retry-after" not in reply.headers
    server.engine.submit_error = TokenIdError("the prompt has the token id 9")
    assert_error(server.complete(), 400, INVALID, "prompt", "invalid_value", message="token id 9")
    server.engine.submit_error = RequestFieldError("session", "an integer from 0 to 9")
    assert_error(server.complete(), 400, INVALID, "session", "invalid_value", message="from 0 to 9")
    server.engine.submit_error = ContextLengthError("1 over 2")
    assert_error(server.chat(), 400, INVALID, "messages", "context_length_exceeded")
    assert_error(server.complete(), 400, INVALID, "prompt", "context_length_exceeded")
    server.engine.submit_error = EngineUnavailableError("worker lost")
    reply = server.chat()
    assert_error(reply, 503, "server_error", message="Worker lost.")
    assert int(reply.headers["retry-after"]) >= 1
    server.engine.submit_error = None
    assert_serves(server)


@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_engine_state(server: RunningServer, state: Any) -> None:
    server.engine.state = state
    for reply in (server.chat(), server.complete(stream=True), server.request("GET", "/health")):
        assert_error(reply, 503, "server_error")
        assert int(reply.headers["retry-after"]) >= 1
    assert server.request("GET", "/v1/models").status == 200


def test_a_request_refused_by_a_drain_gets_the_reason(server: RunningServer) -> None:
    server.engine.state = "draining"
    assert_error(server.chat(), 503, "server_error", message="The server is draining")
    server.engine.state = "ready"
    server.engine.submit_error = EngineUnavailableError("the engine is draining")
    assert_error(server.chat(), 503, "server_error", message="The engine is draining.")


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2, timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("admin", 503, "aborted"), ("owner", 499, "cancelled"), ("late", 504, "deadline_exceeded")],
)
def test_what_was_ended_on_purpose_is_not_tried_again(
    server: RunningServer, stream: bool, reason: str, status: int, code: str
) -> None:
    server.engine.script = lambda request, index: []
    server.engine.script_end = "deadline" if reason == "late" else "cancelled"
    server.engine.cancelled_by[0] = reason
    with pytest.raises(openai.APIStatusError) as caught:
        client_of(server).completions.create(model="test", prompt="hi", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(server.engine.requests) == 1


@pytest.mark.parametrize(("reason", "status", "code"), [("admin", 503, "aborted"), ("owner", 499, "cancelled")])
def test_embeddings_that_were_ended_on_purpose_are_not_tried_again(
    server: RunningServer, reason: str, status: int, code: str
) -> None:
    server.engine.cancelled_by[0] = reason
    with pytest.raises(openai.APIStatusError) as caught:
        client_of(server).embeddings.create(model="test", input="hi")
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(server.engine.requests) == 1


def test_what_the_server_ended_is_tried_again(server: RunningServer) -> None:
    server.engine.script = lambda request, index: []
    server.engine.script_end = "cancelled"
    server.engine.cancelled_by[0] = "shutdown"
    reply = server.chat()
    assert_error(reply, 503, "server_error")
    assert "x-should-retry" not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [("deadline", 504, "deadline_exceeded"), ("cancelled", 503, None), ("error", 500, None)],
)
def test_ends_that_are_errors(server: RunningServer, stream: bool, reason: Any, status: int, code: str | None) -> None:
    server.engine.script = lambda request, index: []
    server.engine.script_end = reason
    assert_error(server.chat(stream=stream, drop_if_late=True, deadline_ms=5), status, "server_error", None, code)


def test_a_defect_is_a_500_without_details(server: RunningServer) -> None:
    server.engine.now_ns = lambda: 1 // 0  # type: ignore[method-assign]
    reply = server.chat()
    assert_error(reply, 500, "server_error")
    assert "zero" not in reply.data.decode()
    del server.engine.now_ns
    assert_serves(server)


def test_request_id(server: RunningServer) -> None:
    assert server.request("GET", "/health", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    for bad in ("a b", "x" * 200, "{}"):
        reply = server.request("GET", "/nowhere", headers={"x-request-id": bad})
        assert reply.headers["x-request-id"].startswith("req-")
    first, second = (server.request("GET", "/health").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_nothing_after_a_connect_is_read_as_a_request(server: RunningServer) -> None:
    smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"CONNECT /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: {len(smuggled)}\r\n\r\n"
    with server.raw(head.encode() + smuggled + smuggled) as connection:
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.count(b"HTTP/1.1 ") == 1
    assert data.startswith(b"HTTP/1.1 404 ")
    assert b"Connection: close" in data


def test_an_error_that_no_client_caused_is_logged() -> None:
    with structlog.testing.capture_logs() as logged:
        assert api_error(CheckpointError("the disk is gone")).status == 500
    assert [entry["event"] for entry in logged] == ["a request failed"]
