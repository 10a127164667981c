"""`tools`, `tool_choice` and `parallel_tool_calls` of a request, checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta, Struct

from eventlm.errors import InputError
from eventlm.text.decoding import FUNCTION_NAME_PATTERN, validation_error
from eventlm.text.protocol import ChatCompletionRequest
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.schema_check import SchemaChecker

MAX_TOOLS = 1024


class FunctionDefinition(Struct):
    """`tools[].function`. `parameters` is a JSON schema of an object; without it the function takes none."""

    name: Annotated[str, Meta(pattern=FUNCTION_NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Struct):
    """A function by its name."""

    name: str


class NamedTool(Struct, tag_field="type", tag="function"):
    """A tool by its name, as a `tool_choice` or within one."""

    function: FunctionName


class AllowedSubset(Struct):
    """`tool_choice.allowed_tools`: the subset of the tools in the prompt that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` of several tools."""

    allowed_tools: AllowedSubset


_Choice = Union[Literal["none", "auto", "required"], NamedTool, AllowedTools]  # noqa: UP007


class ToolUse(Struct, frozen=True):
    """The tools of a request that may call any.

    definitions: as received, for the chat template. callable: indexes of the functions that may be called. mode: a call
    is up to the model, forced, or forced and of the one callable tool.
    """

    definitions: list[dict[str, Any]]
    functions: list[FunctionDefinition]
    callable: list[int]
    mode: Literal["auto", "required", "named"] = "auto"
    is_parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the callable tools."""
        return tuple(self.functions[index].name for index in self.callable)

    @property
    def one_call(self) -> bool:
        """Whether the message ends after its first call."""
        return self.mode == "named" or not self.is_parallel

    @property
    def is_constrained(self) -> bool:
        """Whether the output must follow a grammar: all of it, or from the start of a call on."""
        is_subset = len(self.callable) < len(self.functions)
        return self.mode != "auto" or is_subset or any(self.functions[index].strict for index in self.callable)


def requested_tools(body: ChatCompletionRequest, formats: Formats) -> ToolUse | None:
    """The tools of a body for a model of these formats; None if none can be called. Raises InputError."""
    use = tool_use(body)
    if use is not None and formats.tools is None:
        raise InputError(
            "tools",
            "This model's chat template shows no format of tool calls that is known; leave 'tools' out, or start the "
            "server with --tool-parser NAME.",
        )
    return use


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """The tools of a body; None if none can be called. Raises InputError with the path of the mistake."""
    definitions = body.tools or []
    functions = _functions(definitions)
    choice: _Choice = "auto" if body.tool_choice is None else _convert(body.tool_choice, _Choice, "tool_choice")
    if not functions:
        if choice not in ("none", "auto"):
            raise InputError("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
        return None
    if choice == "none":
        return None
    is_parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        index = _index_of(functions, choice, "tool_choice.function.name")
        return ToolUse(definitions, functions, [index], "named", is_parallel)
    if isinstance(choice, AllowedTools):
        path, subset = "tool_choice.allowed_tools.tools", choice.allowed_tools
        allowed = {
            _index_of(functions, tool, f"{path}[{number}].function.name") for number, tool in enumerate(subset.tools)
        }
        if not allowed:
            raise InputError(path, f"Invalid value for '{path}': it is empty.")
        return ToolUse(definitions, functions, sorted(allowed), subset.mode, is_parallel)
    return ToolUse(definitions, functions, list(range(len(functions))), choice, is_parallel)


def _functions(tools: list[dict[str, Any]]) -> list[FunctionDefinition]:
    if len(tools) > MAX_TOOLS:
        raise InputError("tools", f"Invalid value for 'tools': at most {MAX_TOOLS}, got {len(tools)}.")
    converted: list[ToolDefinition] = _convert(tools, list[ToolDefinition], "tools")
    functions = [tool.function for tool in converted]
    names: set[str] = set()
    checker = SchemaChecker()
    for index, function in enumerate(functions):
        if function.name in names:
            param = f"tools[{index}].function.name"
            raise InputError(param, f"Invalid value for '{param}': another tool has this name.")
        names.add(function.name)
        if function.parameters is not None:
            param = f"tools[{index}].function.parameters"
            if function.parameters.get("type", "object") != "object":
                raise InputError(f"{param}.type", f"Invalid value for '{param}.type': the parameters are an object.")
            checker.check(function.parameters, param)
    return functions


def _index_of(functions: list[FunctionDefinition], tool: NamedTool, param: str) -> int:
    for index, function in enumerate(functions):
        if function.name == tool.function.name:
            return index
    raise InputError(param, f"Invalid value for '{param}': 'tools' has no function of this name.")


def _convert(value: Any, type_: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), path, type_) from error
