"""Chats that other servers answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, BackendFailure
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.forwarding.conftest import ANSWER, CALLS, LOGPROBS, USAGE, forwarded

#: What this server does not know, or does not do itself.
FOREIGN = {
    "verbosity": "low",
    "made_up": {"a": [1, None, 1.0]},
    "temperature": 3.5,
    "logprobs": True,
    "top_logprobs": 40,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "function": {"name": "add", "strict": True, "x": None}}],
    "max_completion_tokens": 9,
    "prompt_cache_key": "a key",
}
OWN = {
    "n": 2,
    "seed": 5,
    "priority": 3,
    "deadline_ms": 10_000,
    "eventlm": {"timings": False},
    "user": "someone",
    "metadata": {"a": "b"},
    "request_id": "mine",
    "session_id": 7,
}


@pytest.fixture
def client(gateway: RunningServer):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_what_is_not_ours_is_passed_on(gateway: RunningServer) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    reply = gateway.chat(**FOREIGN, **OWN, messages=messages, stop=None)
    assert reply.status == 200, reply.data
    assert forwarded(gateway) == FOREIGN | {"messages": messages}
    [request] = gateway.engine.requests
    assert (request.n, request.sampling.seed, request.max_tokens) == (2, 5, 9)
    assert (request.scheduling.priority, request.scheduling.deadline_ns) == (3, 10**10)
    assert request.scheduling.session
    assert not request.scheduling.has_text_ends
    assert not request.scheduling.waits_for_grammar


def test_a_chat_without_max_tokens_has_what_is_left(gateway: RunningServer) -> None:
    gateway.chat()
    [request] = gateway.engine.requests
    assert request.max_tokens == 4096 - len(request.prompt_token_ids)
    assert "max_tokens" not in forwarded(gateway)


def test_a_longer_chat_begins_with_the_tokens_of_a_shorter(gateway: RunningServer) -> None:
    messages = [{"role": "user", "content": "a question of some length"}]
    gateway.chat(messages=messages)
    gateway.chat(messages=[*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}])
    short, long = (request.prompt_token_ids for request in gateway.engine.requests)
    assert long[: len(short) - 1] == short[:-1]
    assert len(long) > len(short) > 5


def test_a_prompt_that_seems_too_long_is_for_the_backend_to_refuse(gateway: RunningServer) -> None:
    assert gateway.chat(messages=[{"role": "user", "content": "x" * 30_000}], max_tokens=6000).status == 200
    [request] = gateway.engine.requests
    assert len(request.prompt_token_ids) + request.max_tokens == 4096
    assert forwarded(gateway)["max_tokens"] == 6000


def test_a_whole_reply_has_what_the_backend_found(gateway: RunningServer) -> None:
    gateway.engine.answer = ANSWER
    reply = gateway.chat().json()
    [choice] = reply["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Well", "Let me see.")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert reply["usage"] == {
        "prompt_tokens": USAGE["prompt"],
        "completion_tokens": USAGE["completion"],
        "total_tokens": USAGE["prompt"] + USAGE["completion"],
        "prompt_tokens_details": {"cached_tokens": USAGE["cached"]},
        "completion_tokens_details": {"reasoning_tokens": USAGE["reasoning"]},
    }


@pytest.mark.parametrize("pace", [0.0, 0.01], ids=["joined", "single"])
def test_a_stream_says_the_same_as_a_whole_reply(gateway: RunningServer, client: openai.OpenAI, pace: float) -> None:
    gateway.engine.answer = ANSWER
    gateway.engine.step_seconds = pace
    messages: Any = [{"role": "user", "content": "hi"}]
    with client.chat.completions.stream(model="test", messages=messages, stream_options={"include_usage": True}) as it:
        found = it.get_final_completion()
    [choice] = found.choices
    message: Any = choice.message
    assert (message.content, message.reasoning_content) == ("Well", "Let me see.")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == CALLS
    assert choice.finish_reason == "tool_calls"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (USAGE["prompt"], USAGE["completion"])


def test_reasoning_can_be_left_out(gateway: RunningServer) -> None:
    gateway.engine.answer = ANSWER
    message = gateway.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "Well"
    assert "reasoning_content" not in message


def test_log_probabilities_come_as_the_backend_gave_them(gateway: RunningServer) -> None:
    parts = [AnswerDelta(entry["token"], 1, logprobs=msgspec.json.encode([entry])) for entry in LOGPROBS]
    gateway.engine.answer = [*parts, AnswerEnd("stop", stop_reason="END")]
    [choice] = gateway.chat(logprobs=True).json()["choices"]
    assert choice["logprobs"]["content"] == LOGPROBS
    assert choice["stop_reason"] == "END"
    *chunks, _ = gateway.chat(logprobs=True, stream=True).events()
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == LOGPROBS


def test_counts_are_ours_where_the_backend_says_nothing(gateway: RunningServer) -> None:
    gateway.engine.answer = [AnswerDelta("a", 2), AnswerDelta("b", 1), AnswerEnd("length")]
    reply = gateway.chat(n=2).json()
    [request] = gateway.engine.requests
    assert reply["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    assert reply["usage"]["completion_tokens"] == 6
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "length"]


@pytest.mark.parametrize(
    ("failure", "status", "type_", "param", "code"),
    [
        (BackendFailure("refused", "too long", 400, 0, "messages", "too_long"), 400, INVALID, "messages", "too_long"),
        (BackendFailure("refused", "no such thing", 422), 422, INVALID, None, None),
        (BackendFailure("refused", "not within a stream"), 400, INVALID, None, None),
        (BackendFailure("overloaded", "the key sk-1", 429), 503, "server_error", None, "backend_overloaded"),
        (BackendFailure("timeout", "the key sk-1"), 504, "server_error", None, "backend_timeout"),
        (BackendFailure("connect", "the key sk-1"), 502, "server_error", None, "backend_connect"),
        (BackendFailure("server", "the key sk-1", 500), 502, "server_error", None, "backend_server"),
        (BackendFailure("broken", "the key sk-1"), 502, "server_error", None, "backend_broken"),
        (BackendFailure("protocol", "the key sk-1"), 502, "server_error", None, "backend_protocol"),
    ],
)
def test_failures_are_errors_in_the_envelope(
    gateway: RunningServer, failure: BackendFailure, status: int, type_: str, param: str | None, code: str | None
) -> None:
    gateway.engine.answer = [failure]
    reply = gateway.chat()
    assert_error(reply, status, type_, param, code)
    assert b"sk-1" not in reply.data
    assert (failure.message.encode() in reply.data) == (status < 500)
    gateway.engine.answer = [AnswerDelta("Hel", 1), failure]
    gateway.engine.step_seconds = 0.02
    *_, error, done = gateway.chat(stream=True).events()
    assert (error["error"]["code"], done) == (code, "[DONE]")


def test_a_full_backend_says_when_to_come_again(gateway: RunningServer) -> None:
    gateway.engine.answer = [BackendFailure("overloaded", "", 429, retry_after_ns=2_500_000_000)]
    assert gateway.chat().headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("functions", [{"name": "f"}]),
        ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    ],
)
def test_what_no_backend_is_asked_for(gateway: RunningServer, field: str, value: Any) -> None:
    message = f"'{field}' is not available for a model that other servers run; leave it out."
    assert_error(gateway.chat(**{field: value}), 400, INVALID, field, "invalid_value", message)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"priority": "high"}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_ours_is_checked(gateway: RunningServer, fields: dict[str, Any], param: str) -> None:
    reply = gateway.chat(**fields)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == param


def test_a_stream_is_resumed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(tokenizer=PieceTokenizer(), forwards=True, resume_seconds=30)
    server.engine.answer = ANSWER
    first = server.chat(stream=True, eventlm={}, made_up=1).data
    found = re.search(rb'"id":"(chatcmpl-[^"]+)"', first)
    assert found is not None
    again = server.request("GET", f"/v1/stream/{found[1].decode()}")
    calls = re.compile(rb'"id":"call_[^"]+"')
    assert len(calls.findall(first)) == 2
    assert calls.findall(again.data) == calls.findall(first)
