"""Bodies become those of chats, whose errors get the names of these bodies."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from eventlm.errors import InputError, InvalidTypeError, UnknownModelError
from eventlm.server.responses.protocol import ResponsesRequest, decode_body
from eventlm.server.responses.translation import chat_request, may_be_lenient, native_names
from eventlm.text.protocol import ChatCompletionRequest, ChatMessage
from tests.server.responses.responding import TOOLS

FUNCTION = {"type": "function", "name": "add"}


def translated(default_strict: bool = True, **fields: Any) -> ChatCompletionRequest:
    body = decode_body(json.dumps({"model": "m", "input": "hi", **fields}).encode(), ResponsesRequest)
    return chat_request(body, [ChatMessage("user", "hi")], body.model, default_strict=default_strict)


def test_fields_with_another_name() -> None:
    chat = translated(
        max_output_tokens=7, reasoning={"effort": "low"}, temperature=0.5, top_k=3, stop=["x"], seed=1, stream=True,
        parallel_tool_calls=False, chat_template_kwargs={"a": 1}, cache_salt="s",
    )  # fmt: skip
    assert (chat.most_tokens, chat.reasoning_effort, chat.parallel_tool_calls) == (7, "low", False)
    same = {"temperature": 0.5, "top_k": 3, "stop": ["x"], "seed": 1, "cache_salt": "s"}
    assert {name: getattr(chat, name) for name in same} == same
    assert chat.chat_template_kwargs == {"a": 1}
    assert (chat.stream, chat.num_logprobs) == (None, None)
    # Without `include`, there are none to have alternatives of.
    assert translated(top_logprobs=3).num_logprobs is None
    assert translated(top_logprobs=3, include=["message.output_text.logprobs"]).num_logprobs == 3
    assert translated(include=["message.output_text.logprobs"]).num_logprobs == 0


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ({"type": "text"}, {"type": "text", "json_schema": None, "schema": None}),
        ({"type": "json_object"}, {"type": "json_object", "json_schema": None, "schema": None}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": None, "schema": {"type": "object"}, "strict": True},
                "schema": None,
            },
        ),
    ],
)
def test_formats_of_the_text(format: dict[str, Any], expected: dict[str, Any]) -> None:
    assert msgspec.to_builtins(translated(text={"format": format}).response_format) == expected


def test_functions_are_strict_unless_they_say_otherwise() -> None:
    tools = [FUNCTION, {**FUNCTION, "strict": False}, {**FUNCTION, "strict": True}, {**FUNCTION, "strict": None}]
    for default in (True, False):
        found = translated(default, tools=tools).tools or []
        assert [tool["function"]["strict"] for tool in found] == [default, False, True, default]
    [tool] = translated(tools=TOOLS[:1]).tools or []
    assert tool["type"] == "function"
    assert tool["function"] == {"strict": True} | {name: TOOLS[0][name] for name in TOOLS[0] if name != "type"}
    assert translated().tools is None


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        (FUNCTION, {"type": "function", "function": {"name": "add"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
        ),
    ],
)
def test_forms_of_tool_choice(choice: Any, expected: Any) -> None:
    assert translated(tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "param", "problem"),
    [
        *(
            ({"tools": [FUNCTION, {"type": name}]}, "tools[1].type", f"it has no '{name}'; run it at the client")
            for name in ("web_search", "web_search_preview", "file_search", "computer_use_preview", "code_interpreter",
                         "image_generation", "local_shell", "shell", "apply_patch", "mcp", "custom")
        ),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type", "'mcp' cannot be chosen"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "Missing required parameter"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice.tools[0].type", "mcp",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode", "'required'"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        translated(**fields)
    assert (caught.value.param, problem in str(caught.value)) == (param, True), str(caught.value)


@pytest.mark.parametrize(
    ("of_chat", "here"),
    [
        ("messages", "input"),
        ("messages[1].content", "input[4].content"),
        ("messages[0]", "instructions"),
        ("tools[3].function.parameters.properties.a", "tools[3].parameters.properties.a"),
        ("tools[3].function.name", "tools[3].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tool_choice.allowed_tools.tools", "tool_choice.tools"),
        ("tool_choice.allowed_tools.tools[1].function.name", "tool_choice.tools[1].name"),
        ("response_format.json_schema.schema.properties", "text.format.schema.properties"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
        ("max_tokens", "max_output_tokens"),
        ("temperature", "temperature"),
    ],
)
def test_errors_have_the_names_of_the_body(of_chat: str, here: str) -> None:
    with pytest.raises(InputError) as caught, native_names(["instructions", "input[4]"]):
        raise InvalidTypeError(of_chat, f"Invalid type for '{of_chat}': it is wrong.")
    assert caught.value.param == here
    assert str(caught.value) == f"Invalid type for '{here}': it is wrong."
    assert caught.value.code == "invalid_type"


def test_every_field_that_an_error_names_is_one_of_the_body() -> None:
    with pytest.raises(InputError) as caught, native_names([]):
        raise InputError("logprob_token_ids", "'logprob_token_ids' is only allowed when 'logprobs' is set.")
    assert str(caught.value) == "'logprob_token_ids' is only allowed when 'include' is set."


def test_an_error_with_the_same_name_stays_as_it_is() -> None:
    with pytest.raises(UnknownModelError), native_names([]):
        raise UnknownModelError("m")


def test_which_errors_may_come_of_strictness() -> None:
    error = InputError("tools[0].function.parameters", "")
    for strict, is_lenient in ((None, True), (True, False)):
        body = decode_body(
            json.dumps({"model": "m", "input": "", "tools": [{**FUNCTION, "strict": strict}]}).encode(),
            ResponsesRequest,
        )
        assert may_be_lenient(body, error) == is_lenient
        assert not may_be_lenient(body, InputError("messages", ""))
