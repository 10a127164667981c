"""Bodies: what is refused by name, and what to do instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.server.responses.protocol import IGNORED, InputTokensRequest, ResponsesRequest, decode_body


def decode(**fields: Any) -> ResponsesRequest:
    return decode_body(json.dumps({"model": "m", "input": "hi", **fields}).encode(), ResponsesRequest)


@pytest.mark.parametrize(
    ("fields", "param", "remedy"),
    [
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send their text as 'instructions' and 'input'"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "'truncation' to \"auto\""),
        ({"moderation": {"model": "m"}}, "moderation", "moderate at the client"),
        ({"max_tokens": 5}, "max_tokens", "here it is 'max_output_tokens'"),
        ({"messages": []}, "messages", "here it is 'input'"),
        ({"response_format": {"type": "text"}}, "response_format", "here it is 'text.format'"),
        ({"logprobs": True}, "logprobs", "'include': [\"message.output_text.logprobs\"]"),
        ({"n": 2}, "n", "send several requests"),
        ({"echo": True}, "echo", "/v1/completions has it"),
        ({"use_beam_search": True}, "use_beam_search", "leave it out or set it to false"),
        ({"include": ["file_search_call.results"]}, "include[0]", "'reasoning.encrypted_content'"),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]", "this server can include"),
        ({"truncation": "middle"}, "truncation", "supported values are 'auto', 'disabled'"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort", "'low', 'max', 'medium'"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "'json_object', 'json_schema', 'text'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"metadata": {"a": 1}}, "metadata", "expected `str`"),
        ({"input": 5}, "input", "Invalid type"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "Invalid type"),
        ({"input": [{"id": "x" * 513, "role": "user", "content": "hi"}]}, "input[0].id", "512"),
        ({"input": [{"type": "function_call", "call_id": "x" * 513}]}, "input[0].call_id", "512"),
        ({"tools": ["x"]}, "tools[0]", "expected `object`"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        decode(**fields)
    assert caught.value.param == param
    assert remedy in str(caught.value), str(caught.value)


def test_neutral_values_and_fields_without_effect() -> None:
    body = decode(
        n=1, logprobs=False, echo=False, prompt=None, context_management=[], text={"verbosity": "low"}, unknown=1,
        stream_options={"include_obfuscation": True}, max_tool_calls=3, prompt_cache_key="k", safety_identifier="s",
        user="u", include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert not body.wants_logprobs
    assert [getattr(body, name) for name in IGNORED] == [3, "s", "u"]
    assert decode(include=["message.output_text.logprobs"]).wants_logprobs


def test_fields_of_this_server_and_of_vllm_are_inherited() -> None:
    body = decode(top_k=3, min_p=0.1, seed=7, priority=2, deadline_ms=50, request_id="r", eventlm={"timings": True})
    found = {name: getattr(body, name) for name in ("top_k", "min_p", "seed", "priority", "deadline_ms")}
    assert found == {"top_k": 3, "min_p": 0.1, "seed": 7, "priority": 2, "deadline_ms": 50}
    assert body.wants_timings


def test_a_conversation_in_either_form() -> None:
    assert decode(conversation="conv_1").conversation_id == "conv_1"
    assert decode(conversation={"id": "conv_2"}).conversation_id == "conv_2"
    assert decode().conversation_id is None


def test_a_count_needs_no_model() -> None:
    assert decode_body(b'{"input": "hi"}', InputTokensRequest).model == ""
