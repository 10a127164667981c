"""Calls as models write them, and what they write that is none."""

from __future__ import annotations

import pytest

from eventlm.text.tools.message import CallDelta, MessageDelta, MessageFormat
from tests.text.tools.cuttings import NAMES, formats, parse_message


def parse(text: str, tool_parser: str = "hermes") -> tuple[str, list[tuple[str, str]]]:
    message, _ = parse_message(text, MessageFormat(tool_names=NAMES), formats(tool_parser))
    return message.content, [(call.name, call.arguments) for call in message.calls]


ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", '{"a": 1}')]),
        (f"So:\n\n<tool_call>{ADD}</tool_call>\n", "So:", [("add", '{"a": 1}')]),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "", [("add", '{"a": 1}')] * 2),
        (f"<tool_call>{ADD}</tool_call>\n\nDone. ", "\n\nDone. ", [("add", '{"a": 1}')]),
        # The end tag is missing, or comes late.
        (f"<tool_call>\n{ADD}", "", [("add", '{"a": 1}')]),
        (f"<tool_call>\n{ADD}}}\n</tool_call>ok", "ok", [("add", '{"a": 1}')]),
        # Tags within strings are text.
        ('<tool_call>{"name":"add","arguments":{"a":"</tool_call>\\""}}</tool_call>', "",
         [("add", '{"a":"</tool_call>\\""}')]),
        # Other orders, other keys, other ways to write arguments.
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"id": [1, "}"], "name": "add", "parameters": {}}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "\\u0061dd", "arguments": {}}</tool_call>', "", [("add", "{}")]),
        # Arguments that are not JSON are told as they are, up to the end tag.
        ('<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>ok', "ok", [("add", '{"a": [1}}')]),
        ('<tool_call>{"name": "add", "arguments": {"a": [1}}', "", [("add", '{"a": [1}}')]),
    ],
)  # fmt: skip
def test_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> and </tool_call> as tags.",
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "nonsense"}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>["add"]</tool_call>',
        '<tool_call>\n{"name": "ad',
        "<tool_call>",
        "a <tool_cal",
        "  \n",
        ADD,
        "",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(text) == (text, [])


def test_a_call_after_one_that_is_none() -> None:
    assert parse(f"<tool_call>\n<tool_call>{ADD}</tool_call>") == ("<tool_call>\n", [("add", '{"a": 1}')])


ADD_3 = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ADD_3, "", [("add", '{"a": 1}')]),
        (f"\n{ADD_3}\n", "", [("add", '{"a": 1}')]),
        (f"<|python_tag|>{ADD_3}", "", [("add", '{"a": 1}')]),
        (f"Let me see. <|python_tag|>{ADD_3}", "Let me see.", [("add", '{"a": 1}')]),
        (f"{ADD_3}; {ADD_3}", "", [("add", '{"a": 1}')] * 2),
        (f"{ADD_3}\n{ADD_3};", "", [("add", '{"a": 1}')] * 2),
        (f"{ADD_3}; so", "; so", [("add", '{"a": 1}')]),
        ('{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        # Not at the start, not a call, not one of the tools: content.
        (f"Call {ADD_3}", f"Call {ADD_3}", []),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ('{"city": "Bern"}', '{"city": "Bern"}', []),
        ('<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
        ("<|python_tag", "<|python_tag", []),
    ],
)
def test_llama_3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse(text, "llama3_json") == (content, calls)


def test_deep_nesting_is_no_error() -> None:
    deep = "[" * 200_000
    assert parse(f'<tool_call>{{"x": {deep}') == (f'<tool_call>{{"x": {deep}', [])
    assert parse(f'<tool_call>{{"name": "add", "arguments": {{"a": {deep}') == ("", [("add", f'{{"a": {deep}')])
    text = '<tool_call>{"name": "add", "arguments": "' + deep + '"}'
    assert parse(text) == (text, [])


def test_indices_count_calls() -> None:
    message, _ = parse_message(f"<tool_call>{ADD}</tool_call>" * 2, MessageFormat(tool_names=NAMES), formats("hermes"))
    assert message == MessageDelta("", "", [CallDelta(0, "add", '{"a": 1}'), CallDelta(1, "add", '{"a": 1}')])
