from __future__ import annotations

import itertools
from typing import Any

from eventlm.text.forwarding.conversation import conversation_text

USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}


def picture(url: str) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}]}


def test_a_beginning_of_a_conversation_is_one_of_its_text() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [USER, CALL, picture("data:x"), USER]
    texts = [conversation_text({"tools": tools, "messages": messages[:number]}) for number in range(5)]
    assert all(long.startswith(short) and long != short for short, long in itertools.pairwise(texts))
    assert "".join(texts[0]).count("\x1e") == 1


def test_no_message_is_taken_for_several() -> None:
    forged = {"role": "user", "content": 'hi"]\x1e["user","hi'}
    assert conversation_text({"messages": [forged]}).count("\x1e") == 1


def test_what_changes_the_prompt_changes_the_text() -> None:
    bodies: list[Any] = [
        {"messages": [USER]},
        {"messages": [USER, USER]},
        {"messages": [{**USER, "role": "system"}]},
        {"messages": [{**USER, "name": "Ann"}]},
        {"messages": [USER], "tools": [{"x": 1}]},
        {"messages": [USER], "documents": [{"x": 1}]},
        {"messages": [USER], "chat_template_kwargs": {"x": 1}},
        {"messages": [picture("data:x")]},
        {"messages": [picture("data:y")]},
    ]
    assert len({conversation_text(body) for body in bodies}) == len(bodies)


def test_what_does_not_change_the_prompt_does_not() -> None:
    assert conversation_text({"messages": [{"content": "hi", "role": "user", "name": None}], "temperature": 1}) == (
        conversation_text({"messages": [USER], "tools": []})
    )


def test_a_picture_costs_as_little_as_its_hash() -> None:
    assert len(conversation_text({"messages": [picture("data:" + "x" * 100_000)]})) < 80
