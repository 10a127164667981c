"""Calls and structures that a request forces, through the openai client."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.grammars import accepts
from tests.server.engine_double import spell
from tests.server.tool_calls import (
    ADD,
    ARGUMENTS,
    CALL,
    CALL_3,
    MESSAGES,
    WEATHER,
    as_streamed,
    ask,
    ask_streamed,
    without_ids,
)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_a_forced_call_that_is_cut_in_its_head_shows_nothing_of_its_format(start_with_client: Any, parser: str) -> None:
    server, client = start_with_client(tool_parser=parser)
    text = CALL if parser == "hermes" else CALL_3
    server.engine.script = spell(text)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for max_tokens in range(1, text.index("Z"), 3):
        for choice in ("required", named):
            [cut] = ask(client, max_tokens=max_tokens, tool_choice=choice)
            assert (cut.message.content or "", cut.finish_reason) == ("", "length")
            [streamed] = ask_streamed(client, max_tokens=max_tokens, tool_choice=choice)
            assert without_ids(streamed) == without_ids(as_streamed(cut))
    # A call that nobody forced may yet be a text.
    assert ask(client, max_tokens=9)[0].message.content == text[:9]


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("fields", "finish_reason", "has_text_ends"),
    [
        ({"tool_choice": "required"}, "tool_calls", False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls", False),
        ({"tool_choice": NAMED}, "stop", False),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "tool_calls", False),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
          "parallel_tool_calls": False}, "tool_calls", True),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
         "tool_calls", False),
    ],
)  # fmt: skip
def test_what_is_forced(
    start_with_client: Any, fields: dict[str, Any], finish_reason: str, has_text_ends: bool
) -> None:
    server, client = start_with_client()
    server.engine.script = spell(CALL, width=9)
    server.engine.script_end = "grammar"
    [choice] = ask(client, **fields)
    assert choice.finish_reason == finish_reason
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    [streamed] = ask_streamed(client, **fields)
    assert without_ids(streamed) == without_ids(as_streamed(choice))
    request = server.engine.requests[0]
    assert request.scheduling.waits_for_grammar
    assert request.scheduling.has_text_ends == has_text_ends
    assert accepts(request.sampling.grammar, CALL)
    assert not accepts(request.sampling.grammar, CALL.replace("get_weather", "other"))
    # Without being strict, a call that is not forced may have any arguments.
    assert accepts(request.sampling.grammar, CALL.replace("city", "town")) == has_text_ends
    assert accepts(request.sampling.grammar, "Hello") == (fields.get("tool_choice") is None or has_text_ends)
    assert accepts(request.sampling.grammar, f"{CALL}\n{CALL}") == (
        has_text_ends or (fields.get("tool_choice") != NAMED and fields.get("parallel_tool_calls", True))
    )


def test_a_structure_for_the_content_beside_calls(start_with_client: Any) -> None:
    server, client = start_with_client()
    server.engine.script = spell('{"x": 1}')
    [choice] = ask(client, response_format={"type": "json_object"})
    assert choice.message.content == '{"x": 1}'
    grammar = server.engine.requests[0].sampling.grammar
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, CALL)
    assert not accepts(grammar, "Hello")


def test_a_schema_that_cannot_be_followed(start_with_client: Any) -> None:
    _, client = start_with_client()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/x"}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[ADD, tool], tool_choice="required", stream=True)
    assert caught.value.param == "tools[1].function.parameters.properties.a"
    # Where nobody has to follow it, it is the model's matter.
    assert ask(client, tools=[tool])[0].finish_reason == "stop"


class GetWeather(pydantic.BaseModel):
    """The weather of a place."""

    city: str
    days: int


def test_the_client_s_own_parsing(start_with_client: Any) -> None:
    """Tools from pydantic models are strict, and their calls come back as such models."""
    server, client = start_with_client()
    server.engine.script = spell(CALL.replace("get_weather", "GetWeather"), width=3)
    tool = openai.pydantic_function_tool(GetWeather)
    completion = client.chat.completions.parse(model="test", messages=MESSAGES, tools=[tool])
    [call] = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)
    with client.chat.completions.stream(model="test", messages=MESSAGES, tools=[tool]) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)
    assert accepts(server.engine.requests[0].sampling.grammar, CALL.replace("get_weather", "GetWeather"))
    assert not accepts(
        server.engine.requests[0].sampling.grammar, CALL.replace("get_weather", "GetWeather")[:-15] + "}"
    )
