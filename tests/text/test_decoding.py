"""What is made of a body's values, and what the errors of fields say that are one of several words."""

from __future__ import annotations

import gc
import threading
from typing import Any

import msgspec
import pytest

from eventlm.text.chat.messages import chat_messages
from eventlm.text.decoding import decode_object, decode_request
from eventlm.text.protocol import ChatCompletionRequest
from tests.server.conftest import INVALID, RunningServer, assert_error


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/embeddings",
            {"input": "x", "encoding_format": "hex"},
            "'encoding_format': supported values are 'base64', 'float'.",
        ),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "'pooling': supported values are 'last', 'mean'."),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "utmost"},
            "supported values are 'high', 'low', 'max', 'medium', 'minimal', 'none', 'xhigh'.",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "all",
            },
            "'tool_choice': supported values are 'auto', 'none', 'required'.",
        ),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"12\\n": 5}}, "'logit_bias'"),
    ],
)
def test_the_words_that_can_be_used_are_named(server: RunningServer, path: str, fields: dict, message: str) -> None:
    reply = server.post(path, {"model": "test", **fields})
    assert_error(reply, 400, INVALID, list(fields)[-1], "invalid_value", message=message)


def test_the_types_that_an_object_can_have_are_named(server: RunningServer) -> None:
    reply = server.chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice={"type": "any"})
    message = "'tool_choice.type': supported values are 'function', 'allowed_tools', got 'any'."
    assert_error(reply, 400, INVALID, "tool_choice.type", "invalid_value", message=message)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 3.0},
        {"n": 2.0, "top_k": 1e1, "seed": 7.0},
        {"priority": -5.0, "deadline_ms": 9e3, "slo": {"ttft_ms": 200.0}},
        {"stop_token_ids": [5.0, 6], "allowed_token_ids": [72.0]},
        {"prompt": [[1.0, 2], [3.0]]},
        {"prompt": [1, 2.0]},
    ],
)
def test_whole_floats_are_integers_where_those_are_wanted(server: RunningServer, fields: dict[str, Any]) -> None:
    """As pydantic takes them: JSON has one kind of number, and Lua or R write 2 as 2.0."""
    replies = [server.complete(**each) for each in (fields, _in_integers(fields))]
    assert [reply.status for reply in replies] == [200, 200], replies[0].data
    requests = server.engine.requests
    floats, integers = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    for one, other in zip(floats, integers, strict=True):
        assert repr((one.sampling, one.prompt_token_ids)) == repr((other.sampling, other.prompt_token_ids))
        assert repr((one.n, one.sampling.seed, one.scheduling.priority)) == repr(
            (other.n, other.sampling.seed, other.scheduling.priority)
        )


def _in_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_integers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_integers(each) for each in value]
    return int(value) if isinstance(value, float) else value


@pytest.mark.parametrize("value", [2.5, "2", "2.0", True, [2.0]])
def test_nothing_else_becomes_an_integer(server: RunningServer, value: Any) -> None:
    assert_error(server.complete(max_tokens=value), 400, INVALID, "max_tokens", "invalid_type")


def test_a_huge_float_is_refused_as_a_huge_integer_is(server: RunningServer) -> None:
    for name in ("max_tokens", "deadline_ms", "seed"):
        errors = [server.complete(**{name: value}).json()["error"] for value in (1e30, int(1e30))]
        assert errors[0] == errors[1]
        assert errors[0]["code"] in ("invalid_value", "context_length_exceeded")
    reply = server.post("/v1/completions", b'{"model": "test", "prompt": "x", "max_tokens": 1e400}')
    assert_error(reply, 400, INVALID)


def test_floats_stay_as_they_are_where_anything_goes() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "number", "minimum": 1.0}}}
    raw = {"model": "test", "messages": [], "n": 1.0, "temperature": 1.0, "tools": [{"parameters": parameters}]}
    raw["chat_template_kwargs"] = {"threshold": 1.0}
    request = decode_request(msgspec.json.encode(raw), ChatCompletionRequest, {})
    assert repr(request.chat_template_kwargs) == "{'threshold': 1.0}"
    assert repr((request.n, request.temperature)) == "(1, 1.0)"
    assert type(request.tools[0]["parameters"]["properties"]["a"]["minimum"]) is float


def test_a_large_body_is_decoded_without_a_search_for_garbage() -> None:
    """Which would take most of the time, in which nobody's stream goes on."""
    found: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    body = msgspec.json.encode({"model": "test", "prompt": "x", "tools": [{"a": [{}]} for _ in range(20_000)]})
    gc.callbacks.append(note)
    try:
        decode_object(body)
        during = found.count("start")
    finally:
        gc.callbacks.remove(note)
    # One may come as soon as there may be any.
    assert during <= 1
    assert gc.isenabled()


def test_many_messages_are_made_ready_in_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return chat_messages(*args, **kwargs)

    monkeypatch.setattr("eventlm.text.chat.messages.chat_messages", noted)
    server.engine.max_model_len = 10**6
    for num_messages in (1, 500):
        assert server.chat(messages=[{"role": "user", "content": "x"}] * num_messages).status == 200
    assert ["tokenizer" in name for name in threads] == [False, True]


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        (
            {"logit_bias": {"five": 1}},
            "logit_bias",
            "each key must be a token id, such as \"50256\"; these are not: 'five'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "it must have 1 to 128 letters, digits, underscores or dashes",
        ),
    ],
)
def test_what_a_text_must_be_is_said_without_a_regular_expression(
    server: RunningServer, fields: dict[str, Any], param: str, problem: str
) -> None:
    body = {"model": "test", "messages": [{"role": "user", "content": "x"}], **fields}
    reply = server.post("/v1/chat/completions", body)
    assert_error(reply, 400, INVALID, param, "invalid_value", message=f"'{param}': {problem}.")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0 (greater_than_equal)."),
        ({"n": -3}, "n", "n must be at least 1, got -3 (greater_than_equal)."),
        ({"n": 129}, "n", "n must be at most 128, got 129 (less_than_equal)."),
        ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, got -1 (greater_than_equal)."),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be at least -1, got -2 (greater_than_equal)."),
        ({"top_p": 0}, "top_p", "top_p must be greater than 0.0, got 0 (greater_than)."),
        ({"temperature": 2.5}, "temperature", "temperature must be at most 2.0, got 2.5 (less_than_equal)."),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "slo.ttft_ms must be at least 1, got 0 (greater_than_equal)."),
        ({"stop_token_ids": [1, -7]}, "stop_token_ids[1]", "must be at least 0, got -7 (greater_than_equal)."),
        ({"seed": 2**63}, "seed", "must be at most 9223372036854775807, got 9223372036854775808 (less_than_equal)."),
        ({"seed": -(2**63) - 1}, "seed", "got -9223372036854775809 (greater_than_equal)."),
        ({"top_logprobs": 10**60, "logprobs": True}, "top_logprobs", f"at most 20, got 1{'0' * 39} (less_than_equal)."),
        ({"thinking_token_budget": -2}, "thinking_token_budget", "must be at least -1, got -2 (greater_than_equal)."),
        ({"logit_bias": {"7": 101}}, "logit_bias.7", "must be at most 100.0, got 101 (less_than_equal)."),
        ({"logit_bias": {"7": 1, "8": -100.5}}, "logit_bias.8", "at least -100.0, got -100.5 (greater_than_equal)."),
        ({"logit_bias": {"9999": 1}}, "logit_bias.9999", "token id 9999 is out of vocabulary, which has the 1024 ids"),
        ({"stop_token_ids": [1024]}, "stop_token_ids[0]", "token id 1024 is out of vocabulary"),
        ({"allowed_token_ids": [5, 1024]}, "allowed_token_ids[1]", "token id 1024 is out of vocabulary"),
        ({"logprobs": True, "logprob_token_ids": [1024]}, "logprob_token_ids[0]", "token id 1024 is out of vocabulary"),
        ({"logit_bias": {"bad1": 50, "bad2": 20}}, "logit_bias", "these are not: 'bad1', 'bad2'."),
        ({"logit_bias": {f"k{i}": 1 for i in range(9)}}, "logit_bias", "'k0', 'k1', 'k2', 'k3', 'k4' and 4 more."),
        ({"logit_bias": {"k" * 999: 1}}, "logit_bias", f"these are not: '{'k' * 64}'."),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 pairs are allowed."),
    ],
)
def test_bounds_are_named_with_what_came(server: RunningServer, fields: dict, param: str, message: str) -> None:
    """As vLLM's callers look for them: the field, the bound, the value, and pydantic's name of the error."""
    assert_error(server.chat(**fields), 400, INVALID, param, "invalid_value", message=message)
    assert not server.engine.requests


def test_a_bias_is_a_number(server: RunningServer) -> None:
    reply = server.chat(logit_bias={"1": 0, "12": "much"})
    assert_error(reply, 400, INVALID, "logit_bias.12", "invalid_type", message="the bias of a token must be a number")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([72, 999_999], "prompt[1]"), (["a", [1024]], "prompt[1][0]"), ([[1], [2, 10**70]], "prompt[1][1]")],
)
def test_a_prompt_s_id_beyond_the_vocabulary(server: RunningServer, prompt: Any, param: str) -> None:
    reply = server.complete(prompt=prompt)
    assert_error(reply, 400, INVALID, param, "invalid_value", message="is out of vocabulary")
    assert str(1024) in reply.json()["error"]["message"]
