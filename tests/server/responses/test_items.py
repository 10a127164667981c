"""Items become the messages of a chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eventlm.errors import InputError
from eventlm.server.responses.items import ItemMessages, input_items, is_reference, shown_input
from eventlm.server.responses.protocol import InputItem

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OTHER_CALL = {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Yes."}]}
ADD: dict[str, Any] = {"id": "c1", "function": {"name": "add", "arguments": "{}"}, "type": "function"}
SUB: dict[str, Any] = {"id": "c2", "function": {"name": "sub", "arguments": "{}"}, "type": "function"}
SAID = [{"type": "text", "text": "Yes."}]


def items_of(*items: dict[str, Any]) -> list[InputItem]:
    return msgspec.convert(list(items), list[InputItem])


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, without fields that are null."""
    found = ItemMessages()
    found.add_all(items_of(*items), "input")
    assert len(found.params) == len(found.messages)
    return [without_nulls(msgspec.to_builtins(message)) for message in found.messages]


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return value


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER], [USER]),
        (
            [{"role": "developer", "content": [{"type": "input_text", "text": name} for name in "ab"]}],
            [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        # A turn of the model is one message, however many items it has.
        (
            [USER, REASONING, ANSWER, CALL, OTHER_CALL, OUTPUT],
            [
                USER,
                {"role": "assistant", "content": SAID, "tool_calls": [ADD, SUB], "reasoning_content": "hm"},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
            ],
        ),
        ([CALL, OUTPUT, OTHER_CALL], [
            {"role": "assistant", "tool_calls": [ADD]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "tool_calls": [SUB]},
        ]),
        ([ANSWER, ANSWER], [{"role": "assistant", "content": SAID}] * 2),
        ([CALL, ANSWER], [{"role": "assistant", "tool_calls": [ADD]}, {"role": "assistant", "content": SAID}]),
        ([REASONING, REASONING, CALL], [
            {"role": "assistant", "reasoning_content": "hm"},
            {"role": "assistant", "reasoning_content": "hm", "tool_calls": [ADD]},
        ]),
        # Without its text, the reasoning of another server says nothing.
        ([{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}, ANSWER],
         [{"role": "assistant", "content": SAID}]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}],
         [{"role": "assistant", "reasoning_content": "in short"}]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
         [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}]),
        ([{**OUTPUT, "output": [{"type": "input_text", "text": "2"}]}],
         [{"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1"}]),
    ],
)  # fmt: skip
def test_messages_of_items(items: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert messages_of(*items) == expected


@pytest.mark.parametrize(
    ("item", "param", "problem"),
    [
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].type",
            "text only",
        ),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type", "'input_file'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[0].content[0].type", "text only"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text", "Missing"),
        ({"role": "tool", "content": "x"}, "input[0].role", "'user', 'assistant', 'system', 'developer'"),
        ({"type": "message", "content": "x"}, "input[0].role", "Missing"),
        ({"role": "user"}, "input[0].content", "Missing"),
        ({**CALL, "call_id": None}, "input[0].call_id", "Missing"),
        ({**OUTPUT, "output": None}, "input[0].output", "Missing"),
        ({**OUTPUT, "output": [{"type": "input_image"}]}, "input[0].output[0].type", "text only"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type", "'web_search_call' items are not supported"),
        ({"type": "mcp_call", "id": "mcp_1"}, "input[0].type", "run at the client"),
        ({"type": "reasoning", "content": "x"}, "input[0].content", "expected a list of parts"),
    ],
)
def test_items_that_are_wrong(item: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        messages_of(item)
    assert (caught.value.param, problem in str(caught.value)) == (param, True), str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_item_without_a_type() -> None:
    assert [is_reference(item) for item in items_of(USER, {"id": "msg_1"}, {"type": "item_reference", "id": "x"})] == [
        False,
        True,
        True,
    ]


def test_an_input_as_it_is_shown() -> None:
    shown = msgspec.to_builtins(shown_input(items_of(USER, ANSWER, CALL, {**USER, "role": "assistant"}), "resp_1"))
    text = {"type": "input_text", "text": "hi"}
    ids = [item.pop("id") for item in shown]
    assert shown == [
        {"type": "message", "role": "user", "content": [text], "status": "completed"},
        {"type": "message", "role": "assistant", "content": ANSWER["content"], "status": "completed"},
        {**CALL, "status": "completed"},
        {"type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
    ]  # fmt: skip
    assert ids[1] == "msg_1"
    assert [id.partition("_")[0] for id in ids] == ["msg", "msg", "fc", "msg"]
    assert len(set(ids)) == 4
    # The ids are those of the response.
    assert shown_input("hi", "resp_1")[0].id == shown_input("hi", "resp_1")[0].id == ids[0]
    assert shown_input("hi", "resp_2")[0].id != ids[0]
    assert input_items("hi")[0].content == shown_input("hi", "resp_1")[0].content
    assert input_items(None) == []
