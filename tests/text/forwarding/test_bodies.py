from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from eventlm.engine.backend import ForwardedRequest
from eventlm.errors import InputError
from eventlm.text.forwarding.bodies import (
    ForwardedChatRequest,
    ForwardedCompletionRequest,
    decode_forwarded,
    forwarded_fields,
    with_max_tokens,
)
from eventlm.text.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    JsonSchemaFormat,
    ResponseFormat,
)

MESSAGES: Any = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}], "extra": None}]


def test_a_body_passes_as_it_came_but_for_what_is_ours() -> None:
    raw = {"messages": MESSAGES, "made_up": {"x": None}, "stop": None, "n": 3, "user": "me", "stream": True, "seed": 1}
    body = decode_forwarded(json.dumps(raw).encode(), ForwardedChatRequest)
    assert forwarded_fields(body) == {"messages": MESSAGES, "made_up": {"x": None}}
    assert (body.n, body.seed, body.stream, body.user) == (3, 1, True, "me")


def test_what_is_passed_cannot_be_given() -> None:
    body = decode_forwarded(b'{"prompt": "a", "passed": {"model": "x"}}', ForwardedCompletionRequest)
    assert body.passed == {"prompt": "a", "passed": {"model": "x"}}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "n": "b"}', b"{" * 10_000])
def test_what_is_no_body(data: bytes) -> None:
    with pytest.raises(InputError):
        decode_forwarded(data, ForwardedCompletionRequest)


def test_a_translated_body_has_what_was_set() -> None:
    body = ChatCompletionRequest(
        model="m",
        messages=[ChatMessage("user", "hi"), ChatMessage("assistant", "", reasoning_content="hm")],
        stop=[],
        top_k=3,
        n=2,
        chat_template_kwargs={"thinking": None},
        response_format=ResponseFormat("json_schema", JsonSchemaFormat(schema={"default": None})),
    )
    assert forwarded_fields(body) == {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ],
        "top_k": 3,
        "chat_template_kwargs": {"thinking": None},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "reply", "schema": {"default": None}},
        },
    }


def test_structures_take_the_names_that_most_servers_know() -> None:
    schema = forwarded_fields(CompletionRequest(prompt="a", guided_json={"type": "object"}))
    assert schema["response_format"]["json_schema"] == {"name": "reply", "schema": {"type": "object"}}
    grammar = forwarded_fields(CompletionRequest(prompt="a", guided_grammar="x"))
    assert grammar == {"prompt": "a", "structured_outputs": {"grammar": "x"}}


@pytest.mark.parametrize(
    ("given", "name"), [({}, "max_tokens"), ({"max_tokens": 9}, "max_tokens"), ({"max_completion_tokens": 9},) * 2]
)
def test_another_limit(given: dict[str, int], name: Any) -> None:
    name = name if isinstance(name, str) else "max_completion_tokens"
    request = ForwardedRequest(endpoint="chat", body=msgspec.json.encode(given | {"x": 1}))
    assert msgspec.json.decode(with_max_tokens(request, 5).body) == {"x": 1, name: 5}
