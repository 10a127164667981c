"""From bodies of the Responses API to those of chats, and from a chat's errors back to the names that bodies have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Union

import msgspec
from msgspec import Struct, structs

from eventlm.errors import InputError
from eventlm.server.responses.protocol import InputFields, ResponsesRequest, TextFormat
from eventlm.server.translation import native_fields
from eventlm.text.decoding import validation_error
from eventlm.text.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    GenerationRequest,
    JsonSchemaFormat,
    ResponseFormat,
)

#: Fields that mean the same in both. How a chat would be streamed is none of its request's matter.
_SHARED = tuple(
    field.name
    for field in structs.fields(GenerationRequest)
    if field.name not in ("stream", "stream_options", "n", "logprobs", "max_tokens", "response_format")
)
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
#: Names in a chat, and here. `response_format` has its schema one level deeper.
_NAMES = (
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^tool_choice\.allowed_tools\b(.*?)(\.function)?(\.name)?$"), r"tool_choice\1\3"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^logprobs$"), "include"),
    (re.compile(r"^max(_completion)?_tokens$"), "max_output_tokens"),
)
_OF_MESSAGE = re.compile(r"^messages\[(\d+)\]")


class FunctionChoice(Struct, tag_field="type", tag="function"):
    """A function by its name."""

    name: str


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` of several functions."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


_Choice = Union[FunctionChoice, AllowedChoice]  # noqa: UP007


def chat_request(
    body: InputFields, messages: list[ChatMessage], model: str, *, default_strict: bool = True
) -> ChatCompletionRequest:
    """The chat that a body asks for. default_strict: of functions that do not say. Raises InputError."""
    shared = {name: getattr(body, name) for name in _SHARED} | {"model": model}
    wants_logprobs = isinstance(body, ResponsesRequest) and body.wants_logprobs
    return ChatCompletionRequest(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if isinstance(body, ResponsesRequest) and wants_logprobs else None,
        response_format=_response_format(body.text.format if body.text is not None else None),
        tools=_tools(body.tools, default_strict=default_strict),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def may_be_lenient(body: InputFields, error: InputError) -> bool:
    """Whether an error comes of functions that are strict only because they do not say."""
    is_of_tools = (error.param or "").startswith("tools")
    return is_of_tools and any(tool.get("strict") is None for tool in body.tools or ())


@contextmanager
def native_names(params: Sequence[str]) -> Iterator[None]:
    """Errors of the chat within have the names of the body. params: the path of what each message comes from."""
    with native_fields(lambda path: _native(path, params)):
        yield


def _native(param: str, params: Sequence[str]) -> str:
    if (found := _OF_MESSAGE.match(param)) and int(found[1]) < len(params):
        return params[int(found[1])] + param[found.end() :]
    for pattern, name in _NAMES:
        param, num_found = pattern.subn(name, param)
        if num_found:
            break
    return param


def _response_format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None or format.type != "json_schema":
        return None if format is None else ResponseFormat(format.type)
    schema = JsonSchemaFormat(format.name, format.description, format.schema, format.strict)
    return ResponseFormat("json_schema", schema)


def _tools(tools: list[dict[str, Any]] | None, *, default_strict: bool) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    return [_tool(tool, f"tools[{index}]", default_strict=default_strict) for index, tool in enumerate(tools)]


def _tool(tool: Mapping[str, Any], param: str, *, default_strict: bool) -> dict[str, Any]:
    type_ = tool.get("type")
    if isinstance(type_, str) and type_ != "function":
        raise InputError(
            f"{param}.type",
            f"Invalid value for '{param}.type': this server runs no tools, so it has no '{type_}'; run it at the "
            "client, and offer it as a tool of the type 'function'.",
        )
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    return {"type": type_, "function": {"strict": default_strict} | function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    type_ = choice.get("type")
    if isinstance(type_, str) and type_ not in ("function", "allowed_tools"):
        raise InputError(
            "tool_choice.type",
            f"Invalid value for 'tool_choice.type': this server runs no tools, so '{type_}' cannot be chosen; "
            "supported values are 'function' and 'allowed_tools'.",
        )
    try:
        found: _Choice = msgspec.convert(choice, _Choice)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), "tool_choice", _Choice) from error
    if isinstance(found, FunctionChoice):
        return _named(found)
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": found.mode, "tools": [_named(tool) for tool in found.tools]},
    }


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}
