"""Tools for models whose chat template has none: a text in the system message, as in Qwen's template."""

from __future__ import annotations

import json
from typing import Any

from eventlm.text.tools.call_parser import CallSyntax

_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, return a json object with function name and arguments:
{example}"""


def write_tools_as_text(
    messages: list[dict[str, Any]], definitions: list[dict[str, Any]], syntax: CallSyntax
) -> list[dict[str, Any]]:
    """The conversation with tool definitions, calls and results written as text."""
    plain = [_plain(message, syntax) for message in messages]
    if definitions:
        text = _INSTRUCTIONS.format(
            definitions="\n".join(_json(definition) for definition in definitions),
            example=_call("<function-name>", "<args-json-object>", syntax),
        )
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    return _merge_results(plain)


def _plain(message: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
            "is_result": True,
        }
    if "tool_calls" not in message:
        return message
    calls = [_written_call(call["function"], syntax) for call in message["tool_calls"]]
    content = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*content, syntax.separator.join(calls)])}


def _merge_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the results of parallel calls: templates may insist that user and assistant take turns."""
    merged: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message.get("is_result", False)
        message = {key: value for key, value in message.items() if key != "is_result"}
        if is_result and was_result:
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
        was_result = is_result
    return merged


def _written_call(function: dict[str, Any], syntax: CallSyntax) -> str:
    arguments = function["arguments"]
    return _call(_json(function["name"]), arguments if isinstance(arguments, str) else _json(arguments), syntax)


def _call(name: str, arguments: str, syntax: CallSyntax) -> str:
    before, after = syntax.layout
    return f'{before}{{"name": {name}, "{syntax.arguments_key}": {arguments}}}{after}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
