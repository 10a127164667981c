"""Several conversations in one body: one choice for each, made as a chat's, and admitted together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell

PATH = "/v1/chat/completions/batch"


def conversation(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def test_each_conversation_has_its_choice(server: RunningServer) -> None:
    server.engine.script = lambda request, index: [[request.prompt_token_ids[-16]], [33]]
    messages = [conversation("a"), conversation("b", "c", "d")]
    fields = {"temperature": 0, "logprobs": True, "return_token_ids": True}
    reply = server.post(PATH, {"model": "test", "messages": messages, **fields}).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    chats = [server.chat(messages=each, **fields).json() for each in messages]
    for choice, chat in zip(choices, chats, strict=True):
        assert choice == chat["choices"][0] | {"index": choice["index"]}
    sums = [sum(chat["usage"][name] for chat in chats) for name in ("prompt_tokens", "completion_tokens")]
    assert [reply["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [
        *sums,
        sum(sums),
    ]
    batched, alone = server.engine.requests[:2], server.engine.requests[2:]
    assert [request.prompt_token_ids for request in batched] == [request.prompt_token_ids for request in alone]
    assert server.engine.num_groups == 3


def test_structures_and_echoes_are_those_of_chats(server: RunningServer) -> None:
    server.engine.script = spell("yes")
    messages = [conversation("a", "Say "), conversation("b")]
    fields = {"echo": True, "structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": {"x": 1}}
    reply = server.post(PATH, {"model": "test", "messages": messages, "add_generation_prompt": False, **fields}).json()
    found = [(choice["message"]["role"], choice["message"]["content"]) for choice in reply["choices"]]
    assert found == [("assistant", "Say yes"), ("user", "byes")]
    assert all(request.sampling.grammar for request in server.engine.requests)


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [[]]}, "messages[0]", "invalid_value"),
    ({"messages": conversation("a")}, "messages[0]", "invalid_type"),
    ({"messages": [conversation("a"), [{"role": "user"}]]}, "messages[1][0].content", "invalid_type"),
    ({"messages": [conversation("a"), [{"role": "user", "content": 3}]]}, "messages[1][0].content", "invalid_type"),
    ({"messages": [conversation("a"), conversation("b" * 300)]}, "messages[1]", "context_length_exceeded"),
    ({"n": 2}, "n", "invalid_value"),
    ({"stream": True}, "stream", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "invalid_value"),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
    ({"use_beam_search": True}, "use_beam_search", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_what_is_refused_is_named(server: RunningServer, fields: dict[str, Any], param: str, code: str) -> None:
    reply = server.post(PATH, {"model": "test", "messages": [conversation("a")], **fields})
    assert_error(reply, 400, INVALID, param, code)
    assert not server.engine.requests
