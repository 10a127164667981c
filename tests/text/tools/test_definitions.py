"""`tools` and `tool_choice`: what is wrong in them, by its path, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.text.decoding import convert_request
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.text.tools.definitions import MAX_TOOLS, ToolUse, tool_use

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def use_of(**fields: Any) -> ToolUse | None:
    return tool_use(convert_request({**BODY, **fields}, ChatCompletionRequest, UNSUPPORTED_IN_CHAT))


def schema(**parameters: Any) -> dict[str, Any]:
    return {"tools": [tool(), tool("g", parameters=parameters)]}


P = "tools[1].function.parameters"
TOO_DEEP: Any = {}
for _ in range(80):
    TOO_DEEP = {"type": "array", "items": TOO_DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": "x"}, "tools", "invalid_type"),
        ({"tools": [1]}, "tools[0]", "invalid_type"),
        ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [tool(), {"type": "function", "function": {}}]}, "tools[1].function.name",
         "missing_required_parameter"),
        ({"tools": [tool(description=3)]}, "tools[0].function.description", "invalid_type"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "invalid_type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool("f\n")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [tool(str(n)) for n in range(MAX_TOOLS + 1)]}, "tools", "invalid_value"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
        (schema(type="string"), f"{P}.type", "invalid_value"),
        (schema(properties=[]), f"{P}.properties", "invalid_value"),
        (schema(properties={"a": 1}), f"{P}.properties.a", "invalid_value"),
        (schema(properties={"a": {"type": "int"}}), f"{P}.properties.a.type", "invalid_value"),
        (schema(properties={"a": {"anyOf": []}}), f"{P}.properties.a.anyOf", "invalid_value"),
        (schema(properties={"a": {"anyOf": [{}, {"enum": []}]}}), f"{P}.properties.a.anyOf[1].enum", "invalid_value"),
        (schema(required="a"), f"{P}.required", "invalid_value"),
        (schema(properties={"a": {"minLength": -1}}), f"{P}.properties.a.minLength", "invalid_value"),
        (schema(properties={"a": {"maximum": "1"}}), f"{P}.properties.a.maximum", "invalid_value"),
        (schema(properties={"a": {"pattern": 1}}), f"{P}.properties.a.pattern", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": 3}, "tool_choice", "invalid_type"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function",
         "missing_required_parameter"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name", "invalid_value"),
        ({"tools": [tool()], "tool_choice": {"type": "web"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools",
         "missing_required_parameter"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
         "tool_choice.allowed_tools.mode", "invalid_value"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools", "invalid_value"),
        ({"tools": [tool()],
          "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("g")]}}},
         "tool_choice.allowed_tools.tools[0].function.name", "invalid_value"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_type"),
    ],
)  # fmt: skip
def test_errors(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        use_of(**fields)
    error = caught.value
    assert (error.param, error.code) == (param, code)
    assert param in str(error)


def test_a_schema_can_be_too_deep() -> None:
    with pytest.raises(InputError, match="64 deep") as caught:
        use_of(**schema(properties={"a": TOO_DEEP}))
    assert str(caught.value.param).startswith(f"{P}.properties.a.items.items")


def test_a_request_can_have_too_many_schemas() -> None:
    """They are checked while everybody waits."""
    many = {str(number): {} for number in range(10_000)}
    assert use_of(tools=[tool(parameters={"properties": many})])
    with pytest.raises(InputError, match="at most 16384 schemas") as caught:
        use_of(tools=[tool(parameters={"properties": many}), tool("g", parameters={"properties": many})])
    assert str(caught.value.param).startswith("tools[1].function.parameters.properties.")


def test_what_schemas_may_have() -> None:
    assert use_of(**schema(
        type="object", properties={"a": True, "b": {"type": ["string", "null"], "exclusiveMinimum": True},
                                   "c": {"items": [{}]}, "d": {"$ref": "#/$defs/X"}, "e": {"format": "uint32"}},
        additionalProperties=False, **{"$defs": {"X": {"const": 1}}, "x-own": [1]},
    ))  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [], "tool_choice": "none"}, {"tool_choice": "auto"},
                                    {"tools": [tool()], "tool_choice": "none"}])  # fmt: skip
def test_no_use(fields: dict[str, Any]) -> None:
    assert use_of(**fields) is None


def summary(**fields: Any) -> tuple[Any, ...]:
    use = use_of(tools=[tool(), tool("g"), tool("h")], **fields)
    assert use is not None
    return use.mode, use.names, use.one_call, use.is_constrained


def test_use() -> None:
    everything = ("f", "g", "h")
    assert summary() == summary(tool_choice="auto") == ("auto", everything, False, False)
    assert summary(parallel_tool_calls=False) == ("auto", everything, True, False)
    assert summary(tool_choice="required") == ("required", everything, False, True)
    assert summary(tool_choice=tool("g")) == ("named", ("g",), True, True)
    allowed = {"mode": "auto", "tools": [tool("h"), tool("g"), tool("h")]}
    assert summary(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}) == ("auto", ("g", "h"), False, True)
    allowed["mode"] = "required"
    assert summary(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})[0] == "required"
    strict = use_of(tools=[tool(), tool("g", strict=True)])
    assert strict is not None
    assert strict.is_constrained
