"""Tool calls of models that know nothing of tools, or of anything: forced ones are valid however wild they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.events import Finished
from tests.checkpoints import make_checkpoint
from tests.serving import Server, serve

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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=2048)
    with serve(tmp_path_factory.mktemp("server"), "--model", str(checkpoint), "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def random_weights(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def check(message: Any) -> list[str]:
    """Names of the functions called; their arguments are valid."""
    assert not message.content
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def check_forced(client: openai.OpenAI, choice: Any, finish_reason: str, n: int) -> None:
    reply = client.chat.completions.create(
        model=model_of(client), messages=MESSAGES, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False,
        temperature=1.5, n=n, seed=1, max_tokens=300,
    )  # fmt: skip
    ended = [each for each in reply.choices if each.finish_reason != "length"]
    assert len(ended) >= 0.95 * n
    assert {each.finish_reason for each in ended} == {finish_reason}
    names = [check(each.message) for each in ended]
    assert all(len(each) == 1 for each in names)
    assert {name for [name] in names} == ({"get_weather"} if choice == NAMED else set(SCHEMAS))


@pytest.mark.parametrize(("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_are_valid(random_weights: openai.OpenAI, choice: Any, finish_reason: str) -> None:
    check_forced(random_weights, choice, finish_reason, n=24)


def test_streamed_calls_are_the_whole_calls(random_weights: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": model_of(random_weights), "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required",
        "temperature": 1.2, "seed": 3, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = random_weights.chat.completions.create(**fields).choices[0]
    with random_weights.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    calls = [
        [call.function.model_dump(include={"name", "arguments"}) for call in choice.message.tool_calls or []]
        for choice in (streamed, whole)
    ]
    assert calls[0] == calls[1]
    assert len(calls[0]) == 1


def test_several_calls_and_limits(random_weights: openai.OpenAI) -> None:
    """What is cut short is the beginning of what would have been valid."""
    reply = random_weights.chat.completions.create(
        model=model_of(random_weights), messages=MESSAGES, tools=TOOLS, tool_choice="required", n=4, seed=5,
        temperature=1.5, max_tokens=200,
    )  # fmt: skip
    num_calls = 0
    for choice in reply.choices:
        calls = choice.message.tool_calls or []
        for call in calls if choice.finish_reason != "length" else calls[:-1]:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        num_calls += len(calls)
    assert num_calls > 4


def test_free_text_beside_strict_tools(random_weights: openai.OpenAI) -> None:
    reply = random_weights.chat.completions.create(
        model=model_of(random_weights), messages=MESSAGES, tools=TOOLS, max_tokens=30, seed=1
    )
    assert reply.choices[0].message.content
    assert not reply.choices[0].message.tool_calls


def test_the_text_ends_after_the_only_call(server: Server, random_weights: openai.OpenAI) -> None:
    """A structure makes sure that the model goes on behind its call."""
    call = '<tool_call>{"name": "ping", "arguments": {}}'
    fields: dict[str, Any] = {
        "model": model_of(random_weights), "messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "n": 4,
        "seed": 1, "extra_body": {"structured_outputs": {"choice": [call + "abcdefghij" * 10]}},
    }  # fmt: skip
    reply = random_weights.chat.completions.create(**fields)
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 4
    assert all(len(check(choice.message)) == 1 for choice in reply.choices)
    chunks = list(random_weights.chat.completions.create(**fields, stream=True))
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
    assert ends == ["tool_calls"] * 4
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    with LogReader(server.trace) as reader:
        events = [line.event() for line in reader]
    assert "tool_calls" in {event.reason for event in events if isinstance(event, Finished)}


@pytest.mark.soak
@pytest.mark.parametrize(("choice", "finish_reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_forced_calls_of_the_default_model(tmp_path: Path, choice: Any, finish_reason: str) -> None:
    flags = ("--dtype", "float32", "--max-model-len", "1024", "--kv-memory", "128MiB")
    with serve(tmp_path, *flags) as server, server.client() as client:
        check_forced(client, choice, finish_reason, n=20)
