"""Every row of the error table, over a real socket; the server goes on after each."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.control.request import ContextLengthError, EngineUnavailableError, QueueFullError

from .conftest import Reply, RunningServer

INVALID = "invalid_request_error"


def assert_error(
    reply: Reply, status: int, type_: str, param: str | None = None, code: str | None = None, message: str = ""
) -> None:
    assert reply.status == status, reply.data
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (type_, param, code), error
    assert message in error["message"]
    assert error["message"]


def assert_serves(server: RunningServer) -> None:
    assert server.chat().json()["choices"][0]["message"]["content"] == "Hello, world"


BODIES_THAT_ARE_NOT_JSON = {
    "empty": b"",
    "truncated": b'{"model": "test"',
    "garbage": b"\x00\x01\x02",
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "invalid UTF-8 outside a string": b'\xff{"model": "test"}',
    "lone surrogate": b'{"model": "test", "prompt": "\\ud800", "max_tokens": 1}',
    "lone surrogate inside": b'{"model": "test", "prompt": "a\\udc00b", "max_tokens": 1}',
    "NaN": b'{"model": "test", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "test", "prompt": "x", "temperature": -Infinity}',
    "a number without end": b'{"model": "test", "prompt": "x", "temperature": 1e999}',
    "an integer without end": b'{"model": "test", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "deep array": b"[" * 60_000,
    "deep object": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "two documents": b"{}{}",
}


@pytest.mark.parametrize("body", BODIES_THAT_ARE_NOT_JSON.values(), ids=BODIES_THAT_ARE_NOT_JSON.keys())
def test_not_json(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert_error(server.post(path, body), 400, INVALID, message="not valid JSON")
    assert_serves(server)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


BAD_CHAT_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [1]}, "messages[0]", "invalid_type"),
    ({"messages": user(5)}, "messages[0].content", "invalid_type"),
    ({"messages": user(None)}, "messages[0].content", "invalid_type"),
    ({"messages": user([{"type": "text", "text": 1}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"text": "x"}])}, "messages[0].content[0].type", "missing_required_parameter"),
    (
        {"messages": user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}])},
        "messages[0].content[1].type",
        "invalid_value",
    ),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [*user("x"), {"role": "wizard", "content": "x"}]}, "messages[1].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 5.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.1}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 5000}, "stop", "invalid_value"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "invalid_type"),
    ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", "invalid_value"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids[0]", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"priority": 2**31}, "priority", "invalid_value"),
    ({"deadline_ms": 0}, "deadline_ms", "invalid_value"),
    ({"deadline_ms": 10**30}, "deadline_ms", "invalid_value"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "invalid_value"),
    ({"slo": 5}, "slo", "invalid_type"),
    ({"presence_penalty": 0.5}, "presence_penalty", "invalid_value"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHAT_FIELDS)
def test_bad_fields_of_a_chat(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    for stream in ({}, {"stream": True}):
        assert_error(server.chat(**{**stream, **fields}), 400, INVALID, param, code, message=param)
    assert not server.engine.requests


BAD_COMPLETION_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ["x", ""]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": [1.5]}, "prompt[0]", "invalid_type"),
    ({"prompt": [1, "x"]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["x", [1]]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[1], [2, 1024]]}, "prompt[1][1]", "invalid_value"),
    ({"prompt": ["x"] * 100, "n": 100}, "prompt", "invalid_value"),
    ({"echo": True}, "echo", "invalid_value"),
    ({"logprobs": 0}, "logprobs", "invalid_value"),
    ({"suffix": "x"}, "suffix", "invalid_value"),
    ({"best_of": 2}, "best_of", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_COMPLETION_FIELDS)
def test_bad_fields_of_a_completion(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    assert_error(server.complete(**fields), 400, INVALID, param, code, message=param)
    assert not server.engine.requests


def test_missing_fields(server: RunningServer) -> None:
    reply = server.post("/v1/chat/completions", {"model": "test"})
    assert_error(reply, 400, INVALID, "messages", "missing_required_parameter")
    reply = server.post("/v1/completions", {"prompt": "x"})
    assert_error(reply, 400, INVALID, "model", "missing_required_parameter")
    assert_error(server.post("/v1/completions", []), 400, INVALID, None, "invalid_type")


def test_neutral_values_and_unknown_fields_are_fine(server: RunningServer) -> None:
    reply = server.chat(
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False, tools=[], tool_choice="auto",
        response_format={"type": "text"}, repetition_penalty=1.0, min_p=None, unheard_of={"a": [1]}, stop=None,
        seed=None, user="u",
    )  # fmt: skip
    assert reply.status == 200
    assert server.complete(echo=False, best_of=1, suffix="", logprobs=None).status == 200


def test_over_the_context(server: RunningServer) -> None:
    code = "context_length_exceeded"
    for fields in ({"max_tokens": 1000}, {"max_completion_tokens": 1000}):
        assert_error(server.chat(**fields), 400, INVALID, "messages", code, message="256 tokens")
        assert "1021 tokens" in server.chat(**fields).json()["error"]["message"]
    assert_error(server.complete(prompt="x" * 300), 400, INVALID, "prompt", code, message="302 tokens")
    assert_error(server.complete(prompt=[5] * 256), 400, INVALID, "prompt", code, message="257 tokens")
    assert_error(server.complete(prompt=["x", "y" * 300]), 400, INVALID, "prompt", code)
    assert not server.engine.requests
    assert server.complete(prompt=[5] * 255, max_tokens=1).status == 200


def test_unknown_model(server: RunningServer) -> None:
    assert_error(server.chat(model="gpt-9"), 404, INVALID, "model", "model_not_found", message="gpt-9")
    assert_error(server.request("GET", "/v1/models/gpt-9"), 404, INVALID, "model", "model_not_found")


@pytest.mark.parametrize("path", ["/", "/v2/models", "/v1", "/v1/chat", "/v1/embeddings", "/%00%ff", "/v1/models/"])
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
    ]:
        for path in ("/v1/models", "/v1/nowhere"):
            reply = server.request("GET", path, headers=headers)
            assert_error(reply, 401, INVALID, None, code)
    key = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
    assert server.request("GET", "/v1/models", headers=key).status == 200
    assert server.request("GET", "/health").status == 200


def test_content_type(server: RunningServer) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        assert_error(server.request("POST", "/v1/completions", b"{}", headers), 415, INVALID)
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert server.request("POST", "/v1/completions", b'{"model":"test","prompt":"x"}', headers).status == 200


def test_engine_errors(server: RunningServer) -> None:
    server.engine.submit_error = QueueFullError("the queue is full: 1024 sequences wait")
    reply = server.chat(stream=True)
    assert_error(reply, 429, "requests", None, "rate_limit_exceeded", message="queue is full")
    assert int(reply.headers["retry-after"]) >= 1
    server.engine.submit_error = ContextLengthError("1 over 2")
    assert_error(server.chat(), 400, INVALID, "messages", "context_length_exceeded")
    assert_error(server.complete(), 400, INVALID, "prompt", "context_length_exceeded")
    server.engine.submit_error = EngineUnavailableError("worker lost")
    reply = server.chat()
    assert_error(reply, 503, "server_error", message="worker lost")
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
