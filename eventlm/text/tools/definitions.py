"""`tools`, `tool_choice` and `parallel_tool_calls` of a request: checked, and what they come to."""

from __future__ import annotations

import re
from typing import Any, Literal, Union

import msgspec
from msgspec import Struct

from eventlm.errors import InputError, InvalidTypeError
from eventlm.text.decoding import validation_error
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tools.schema_check import SchemaChecker

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FunctionDefinition(Struct):
    """`tools[].function`. `parameters` is a JSON schema of an object; without it the function takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    """One of `tools`."""

    type: str
    function: FunctionDefinition


class FunctionName(Struct):
    """A function by its name."""

    name: str


class NamedTool(Struct):
    """A tool by its name, as a `tool_choice` or within one."""

    type: str
    function: FunctionName


class AllowedTools(Struct):
    """`tool_choice.allowed_tools`: the tools that may be called of those that the model is told of."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


_Choice = Union[Literal["none", "auto", "required"], NamedTool, AllowedTools]  # noqa: UP007


class ToolUse(Struct, frozen=True):
    """The tools of a request that may call any.

    definitions: as they came, for the chat template. callable: the places of those that may be called. mode: whether
    a call is up to the model, forced, or forced and of the one tool that is callable.
    """

    definitions: list[dict[str, Any]]
    functions: list[FunctionDefinition]
    callable: list[int]
    mode: Literal["auto", "required", "named"] = "auto"
    is_parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the callable tools."""
        return tuple(self.functions[place].name for place in self.callable)

    @property
    def one_call(self) -> bool:
        """Whether the message ends behind its first call."""
        return self.mode == "named" or not self.is_parallel

    @property
    def is_constrained(self) -> bool:
        """Whether what is generated must follow a grammar: in all of it, or from where a call begins."""
        is_subset = len(self.callable) < len(self.functions)
        return self.mode != "auto" or is_subset or any(self.functions[place].strict for place in self.callable)


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """What the body says of tools; None if none can be called. Raises InputError with the path of what is wrong."""
    functions = _functions(body.tools or [])
    choice = _tool_choice(body.tool_choice)
    if not functions:
        if choice not in ("none", "auto"):
            raise InputError("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
        return None
    if choice == "none":
        return None
    everything = list(range(len(functions)))
    is_parallel = body.parallel_tool_calls is not False
    definitions = body.tools or []
    if isinstance(choice, NamedTool):
        place = _place(functions, choice, "tool_choice.function.name")
        return ToolUse(definitions, functions, [place], "named", is_parallel)
    if isinstance(choice, AllowedTools):
        path = "tool_choice.allowed_tools.tools"
        allowed = {_place(functions, tool, f"{path}[{index}].function.name") for index, tool in enumerate(choice.tools)}
        if not allowed:
            raise InputError(path, f"Invalid value for '{path}': it is empty.")
        return ToolUse(definitions, functions, sorted(allowed), choice.mode, is_parallel)
    return ToolUse(definitions, functions, everything, "required" if choice == "required" else "auto", is_parallel)


def _functions(tools: list[dict[str, Any]]) -> list[FunctionDefinition]:
    if len(tools) > MAX_TOOLS:
        raise InputError("tools", f"Invalid value for 'tools': at most {MAX_TOOLS}, got {len(tools)}.")
    functions: list[FunctionDefinition] = []
    names: set[str] = set()
    checker = SchemaChecker()
    for place, definition in enumerate(tools):
        function = _function(definition, f"tools[{place}]", checker)
        if function.name in names:
            param = f"tools[{place}].function.name"
            raise InputError(param, f"Invalid value for '{param}': another tool has this name.")
        names.add(function.name)
        functions.append(function)
    return functions


def _function(definition: dict[str, Any], path: str, checker: SchemaChecker) -> FunctionDefinition:
    if definition.get("type", "function") != "function":
        raise _only_functions(f"{path}.type")
    function: FunctionDefinition = _convert(definition, ToolDefinition, path).function
    if not _NAME.fullmatch(function.name):
        param = f"{path}.function.name"
        raise InputError(
            param, f"Invalid value for '{param}': a name has 1 to 64 letters, digits, underscores and hyphens."
        )
    if function.parameters is not None:
        param = f"{path}.function.parameters"
        if function.parameters.get("type", "object") != "object":
            raise InputError(f"{param}.type", f"Invalid value for '{param}.type': the parameters are an object.")
        checker.check(function.parameters, param)
    return function


def _tool_choice(value: Any) -> _Choice:
    if value is None:
        return "auto"
    if value in ("none", "auto", "required"):
        choice: _Choice = value
        return choice
    if not isinstance(value, dict):
        words = "'none', 'auto', 'required' or an object that names a tool"
        if isinstance(value, str):
            raise InputError("tool_choice", f"Invalid value for 'tool_choice': expected {words}.")
        raise InvalidTypeError("tool_choice", f"Invalid type for 'tool_choice': expected {words}.")
    if value.get("type") == "allowed_tools":
        allowed: AllowedTools = _convert(value.get("allowed_tools"), AllowedTools, "tool_choice.allowed_tools")
        return allowed
    if value.get("type", "function") != "function":
        raise _only_functions("tool_choice.type")
    named: NamedTool = _convert(value, NamedTool, "tool_choice")
    return named


def _only_functions(param: str) -> InputError:
    return InputError(param, f"Invalid value for '{param}': the only tools are of type 'function'.")


def _place(functions: list[FunctionDefinition], tool: NamedTool, param: str) -> int:
    for place, function in enumerate(functions):
        if function.name == tool.function.name:
            return place
    raise InputError(param, f"Invalid value for '{param}': 'tools' has no function of this name.")


def _convert(value: Any, type_: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), path, type_) from error
