"""Tool calls of a real model that has never seen a tool: forced ones are valid all the same, however wild it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.serving import Server

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
PING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "ping": PING}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Test", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Bern?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = ["--dtype", "float32", "--no-prefix-cache", "--max-model-len", "1024", "--kv-memory", "128MiB"]
    server = Server(tmp_path_factory.mktemp("server"), *flags)
    try:
        with server.wait_ready().client() as client:
            yield client
        assert server.stop() == 0
    finally:
        server.close()


def check(message: Any) -> list[str]:
    """Names of the functions called; their arguments are valid."""
    assert not message.content
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


@pytest.mark.parametrize(("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_are_valid(client: openai.OpenAI, choice: Any, finish_reason: str) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
        temperature=1.5, n=6, seed=1, max_tokens=150,
    )  # fmt: skip
    ended = [each for each in reply.choices if each.finish_reason != "length"]
    assert len(ended) >= 5
    assert {each.finish_reason for each in ended} == {finish_reason}
    names = [check(each.message) for each in ended]
    assert all(len(each) == 1 for each in names)
    if choice == NAMED:
        assert {name for [name] in names} == {"get_weather"}


def test_streamed_calls_are_the_whole_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "temperature": 0.8,
        "seed": 3, "max_tokens": 80,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert [call.function.model_dump(include={"name", "arguments"}) for call in streamed.message.tool_calls or []] == [
        call.function.model_dump(include={"name", "arguments"}) for call in whole.message.tool_calls or []
    ]


def test_free_text_beside_strict_tools(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=TOOLS, temperature=0, max_tokens=30, stop=["."]
    )
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls
