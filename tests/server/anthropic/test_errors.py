"""Errors in Anthropic's form, and the exceptions that its client makes of them."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse

from eventlm.engine.rate_limits import RateLimitError
from eventlm.engine.request import EngineUnavailableError, QueueFullError
from eventlm.server.anthropic.errors import error_reply
from eventlm.server.errors import ApiError
from tests.http_exchange import Reply
from tests.server.anthropic.conftest import Start
from tests.server.anthropic.conversations import MESSAGES, PATH, send
from tests.server.conftest import RunningServer

JSON = {"Content-Type": "application/json"}


def assert_anthropic_error(reply: Reply, status: int, type_: str, message: str = "") -> None:
    assert reply.status == status, reply.data
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert {"type", "message"} <= body["error"].keys() <= {"type", "message", "details"}
    assert (body["type"], body["error"]["type"]) == ("error", type_)
    assert message in body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    if type_ not in ("request_too_large", "conflict_error"):
        ErrorResponse.model_validate(body, strict=True)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "type_", "message"),
    [
        ("POST", PATH, b"{", JSON, 400, "invalid_request_error", "not valid JSON"),
        ("POST", PATH, b"{}", JSON, 400, "invalid_request_error", "Missing required parameter: 'model'."),
        ("POST", PATH, b"{}", {}, 415, "invalid_request_error", "Content-Type"),
        ("POST", PATH, b"{" + b" " * 70_000, JSON, 413, "request_too_large", "65536 bytes"),
        ("GET", PATH, None, {}, 405, "invalid_request_error", "Not allowed to GET on /v1/messages"),
        ("POST", f"{PATH}/batches", b"{}", JSON, 404, "not_found_error", "/v1/messages/batches"),
        ("POST", f"{PATH}/count_tokens", b"[]", JSON, 400, "invalid_request_error", "must be a JSON object"),
    ],
)
def test_http_errors(
    server: RunningServer,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    type_: str,
    message: str,
) -> None:
    assert_anthropic_error(server.request(method, path, body, headers), status, type_, message)


def test_keys(start_server: Any) -> None:
    server = start_server(api_key="sesame")
    body = b'{"model":"test","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
    for sent in ({}, {"x-api-key": "no"}, {"Authorization": "Bearer no"}):
        for path in (PATH, f"{PATH}/nowhere"):
            assert_anthropic_error(server.request("POST", path, body, JSON | sent), 401, "authentication_error")
    for sent in ({"x-api-key": "sesame"}, {"Authorization": "Bearer sesame"}):
        assert server.request("POST", PATH, body, JSON | sent).status == 200
    with anthropic.Anthropic(base_url=server.url, api_key="sesame") as client:
        assert client.messages.create(model="test", max_tokens=9, messages=MESSAGES).content
    with anthropic.Anthropic(base_url=server.url, api_key="no") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model="test", max_tokens=9, messages=MESSAGES)


def test_engine_errors(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    for error, exception, type_ in (
        (QueueFullError("the queue is full"), anthropic.RateLimitError, "rate_limit_error"),
        (EngineUnavailableError("worker lost"), anthropic.InternalServerError, "overloaded_error"),
        (ApiError(504, "Late.", type="server_error"), anthropic.InternalServerError, "timeout_error"),
    ):
        server.engine.submit_error = error  # type: ignore[assignment]
        for stream in (False, True):
            with pytest.raises(exception) as caught:
                client.messages.create(model="test", max_tokens=9, messages=MESSAGES, stream=stream)
            assert caught.value.type == type_
            assert caught.value.request_id
            has_retry = caught.value.status_code in (429, 503)
            assert ("retry-after" in caught.value.response.headers) == has_retry
    server.engine.submit_error = None
    with pytest.raises(anthropic.NotFoundError, match="claude-opus") as missing:
        client.messages.create(model="claude-opus", max_tokens=9, messages=MESSAGES)
    assert missing.value.type == "not_found_error"
    server.engine.state = "loading"
    assert_anthropic_error(send(server), 503, "overloaded_error", "loading")


def test_the_client_tries_again(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    server.engine.submit_error = QueueFullError("the queue is full")
    again = client.with_options(max_retries=1)

    def let_in(*_: Any) -> None:
        server.engine.submit_error = None

    server.loop.call_soon_threadsafe(server.loop.call_later, 0.2, let_in)
    assert again.messages.create(model="test", max_tokens=9, messages=MESSAGES).content
    assert server.engine.num_groups == 2
    # What will not go away on a retry says so.
    server.engine.script_end = "deadline"
    with pytest.raises(anthropic.InternalServerError) as caught:
        again.messages.create(model="test", max_tokens=100, messages=MESSAGES)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert server.engine.num_groups == 3


def test_rate_limits(start_server: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "sesame"\nlimits = { requests_per_minute = 1 }\n')
    keys.chmod(0o600)
    server = start_server(api_keys_file=str(keys))
    body = {"model": "test", "max_tokens": 9, "messages": MESSAGES}
    first, second = (server.post(PATH, body, {"x-api-key": "sesame"}) for _ in range(2))
    assert first.status == 200
    assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert_anthropic_error(second, 429, "rate_limit_error")
    assert second.headers["anthropic-ratelimit-requests-limit"] == "1"
    assert int(second.headers["retry-after"]) > 0
    assert issubclass(RateLimitError, Exception)


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (400, "invalid_request_error"),
        (403, "permission_error"),
        (408, "timeout_error"),
        (409, "conflict_error"),
        (422, "invalid_request_error"),
        (499, "api_error"),
        (500, "api_error"),
    ],
)
def test_types(status: int, type_: str) -> None:
    assert error_reply(ApiError(status, "No.")).error.type == type_


def test_codes(server: RunningServer) -> None:
    for fields, code in (
        ({"model": "claude"}, "model_not_found"),
        ({"max_tokens": "x"}, "invalid_type"),
        ({"thread": {"type": "create"}}, "thread_unsupported_request"),
    ):
        assert send(server, **fields).json()["error"]["details"] == {"error_code": code}


def test_what_is_refused_by_name(server: RunningServer) -> None:
    for method, path in (("GET", f"{PATH}/batches"), ("POST", f"{PATH}/batches"), ("GET", f"{PATH}/batches/b/results")):
        error = server.request(method, path).json()["error"]
        assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "not_supported"})
        assert "use /v1/files and /v1/batches" in error["message"]
    assert "use /v1/messages" in server.request("POST", "/v1/complete").json()["error"]["message"]


def test_other_paths_keep_their_form(server: RunningServer) -> None:
    reply = server.request("POST", "/v1/message")
    assert reply.json().keys() == {"error"}
    assert "request-id" not in reply.headers
