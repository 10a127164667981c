"""Structured output through the official client, over the fake worker; the run verifies and is executed again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from eventlm.replay.execute.execution import execute
from tests.serving import Server, serve

#: Must not get anywhere but to the worker.
CANARY = "canarius"
SCHEMA = {
    "type": "object",
    "properties": {CANARY: {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": [CANARY, "n"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Tell me of a person."}]


class Person(pydantic.BaseModel):
    """What a program would ask for."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    tags: list[str] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its run is verified and run again when all tests are done, and its log and trace say nothing of schemas."""
    flags = ("--model", "fake", "--record-tokens")
    with serve(tmp_path_factory.mktemp("server"), *flags, check_invariants=True) as server:
        yield server
    assert CANARY not in server.stderr
    assert CANARY not in server.trace.read_text()
    again = execute(server.trace, model="fake", teacher_force=True)
    assert (again.exit_code, again.mismatches) == (0, [])


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def test_any_json_object(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=MESSAGES, response_format={"type": "json_object"}, n=4, seed=3
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_a_schema_holds_in_replies_and_streams(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "response_format": wanted, "seed": 8}
    [whole] = client.chat.completions.create(**fields).choices
    jsonschema.validate(json.loads(whole.message.content or ""), SCHEMA)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_pydantic_model_is_parsed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Person, seed=1)
    assert isinstance(reply.choices[0].message.parsed, Person)
    with client.chat.completions.stream(model="fake", messages=MESSAGES, response_format=Person, seed=2) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": r"[a-z]{3}-\d{2}"}, r"[a-z]{3}-\d{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "a" ("b" | "c")+ "."'}, r"a[bc]+\."),
        ({"grammar": 'start: "x" /[0-9]{2}/ "y"?'}, "x[0-9]{2}y?"),
        ({"json": {"enum": ["p", "q"]}}, '"[pq]"'),
    ],
)
def test_the_kinds_of_structure(client: openai.OpenAI, structure: dict[str, Any], pattern: str) -> None:
    """Of several prompts in one body, and by the older names too."""
    [(kind, value)] = structure.items()
    for body in ({"structured_outputs": structure}, {f"guided_{kind}": value}):
        reply = client.completions.create(model="fake", prompt=["x", "y"], max_tokens=200, extra_body=body)
        for choice in reply.choices:
            assert re.fullmatch(pattern, choice.text), choice.text
            assert choice.finish_reason == "stop"


def test_a_structure_that_max_tokens_cut_short_is_a_beginning(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="x", max_tokens=6, extra_body={"structured_outputs": {"regex": "[0-9]{9}"}}
    )
    assert (len(reply.choices[0].text), reply.choices[0].finish_reason) == (6, "length")
    assert reply.choices[0].text.isdigit()


def test_what_cannot_be_built_is_a_bad_request(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {CANARY: {"type": "array", "uniqueItems": True}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, response_format=wanted)
    assert caught.value.param == f"response_format.json_schema.schema.properties.{CANARY}"
    assert "uniqueItems" in caught.value.message
