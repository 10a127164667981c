"""`/api/chat`: lines of streams, tools in both directions, and bodies without messages."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from eventlm.server.ollama.chat import OllamaMessage, chat_messages
from eventlm.server.ollama.lines import OllamaFunction, OllamaToolCall
from eventlm.text.chat_template import ChatTemplate
from tests.processes import wait_until
from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.ollama.clients import CREATED, LAST, MESSAGES, assert_ollama_error, chat, lines
from tests.server.tool_calls import ARGUMENTS, CALL, TOOLS


def said(**message: Any) -> dict[str, Any]:
    """A line before the last."""
    return {"done": False, "message": {"role": "assistant", "content": "", **message}}


def call(index: int) -> dict[str, Any]:
    return {"function": {"name": "get_weather", "arguments": ARGUMENTS, "index": index}}


def without_ids(line: dict[str, Any]) -> dict[str, Any]:
    for each in line["message"].get("tool_calls", []):
        assert each.pop("id").startswith("call_")
    return line


BROKEN_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": Bern, "days": 02}}</tool_call>'
#: What a model says so many bytes a step, and the lines before the last.
STREAMS: list[tuple[str, int, dict[str, Any], list[dict[str, Any]]]] = [
    ("Hé 🙂", 4, {}, [said(content="Hé "), said(content="🙂")]),
    ("", 1, {}, []),
    (
        "<think>hm</think>Yes.",
        1000,
        {},
        [said(thinking="hm"), said(content="Yes.")],
    ),
    (
        "<think>a b</think>\n\nYes.",
        10,
        {},
        [said(thinking="a b"), said(content="Yes.")],
    ),
    (f"So.{CALL}", 1000, {"tools": TOOLS}, [said(content="So."), said(tool_calls=[call(0)])]),
    (f"{CALL}\n{CALL}", 1000, {"tools": TOOLS}, [said(tool_calls=[call(0), call(1)])]),
    (f"{CALL}\n{CALL}", 7, {"tools": TOOLS}, [said(tool_calls=[call(0)]), said(tool_calls=[call(1)])]),
    # One that the text's end cuts is content, and so is one whose arguments are not JSON.
    (
        f"{CALL}{CALL[:60]}",
        1000,
        {"tools": TOOLS},
        [said(tool_calls=[call(0)]), said(content='{"name": "get_weather", "arguments": {"city": "Z')],
    ),
    (
        BROKEN_CALL,
        1000,
        {"tools": TOOLS},
        [said(content='{"name": "get_weather", "arguments": {"city": Bern, "days": 02}}')],
    ),
    (CALL, 1000, {}, [said(content=CALL)]),
]


@pytest.mark.parametrize(("text", "width", "fields", "expected"), STREAMS)
def test_the_lines_of_a_stream(
    start_with_ollama: Any, text: str, width: int, fields: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    server, client = start_with_ollama(reasoning_parser="qwen3", tool_parser="hermes")
    server.engine.script = spell(text, width=width)
    *found, last = [without_ids(line) for line in lines(chat(server, **fields))]
    assert found == expected
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    # A whole reply is all lines together.
    whole = without_ids(chat(server, stream=False, **fields).json())
    messages = [line["message"] for line in expected]
    assert whole["message"].get("content") == "".join(message["content"] for message in messages)
    assert whole["message"].get("thinking", "") == "".join(message.get("thinking", "") for message in messages)
    calls = [each for message in messages for each in message.get("tool_calls", [])]
    assert whole["message"].get("tool_calls", []) == calls
    assert (whole["done"], whole["done_reason"]) == (True, "stop")
    # The official client reads the same.
    parts = [part.message for part in client.chat(model="test", messages=MESSAGES, stream=True, **fields)]
    assert "".join(part.content or "" for part in parts) == whole["message"]["content"]
    assert [each.function.arguments for part in parts for each in part.tool_calls or []] == [ARGUMENTS] * len(calls)


def test_a_whole_reply_and_the_last_line(server: RunningServer) -> None:
    whole = chat(server, stream=False)
    assert whole.headers["content-type"] == "application/json"
    body = whole.json()
    assert re.fullmatch(CREATED, body.pop("created_at"))
    message = {"role": "assistant", "content": "Hello, world"}
    assert body == {"model": "test", "message": message, **LAST}
    *_, last = lines(chat(server, options={"num_predict": 5}))
    message["content"] = ""
    assert last == {"message": message, **LAST, "done_reason": "length", "eval_count": 5}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "load"),
        ({"messages": None}, "load"),
        ({"messages": [], "keep_alive": "5m"}, "load"),
        ({"messages": [], "keep_alive": -1}, "load"),
        ({"messages": [], "keep_alive": 0}, "unload"),
        ({"messages": [], "keep_alive": "0s"}, "unload"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_without_messages_the_model_is_loaded(
    server: RunningServer, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    body = chat(server, stream=stream, **fields).json()
    assert re.fullmatch(CREATED, body.pop("created_at"))
    message = {"role": "assistant", "content": ""}
    assert body == {"model": "test", "message": message, "done": True, "done_reason": reason}
    assert not server.engine.requests


def test_what_the_template_gets_of_calls_and_results(server: RunningServer) -> None:
    server.engine.max_model_len = 4096
    server.context.tokenizer.chat_template = ChatTemplate("{{ messages | tojson }}{{ tools | tojson }}", {})
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("add", "get_weather")]
    messages = [
        {"role": "User", "content": "hi"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [*calls, {**calls[0], "id": "mine"}]},
        {"role": "tool", "tool_name": "get_weather", "content": "b"},
        {"role": "tool", "tool_name": "add", "content": "a"},
        {"role": "tool", "tool_call_id": "mine", "content": "c"},
        {"role": "tool", "content": "lost"},
    ]
    tool = {"function": TOOLS[0]["function"]}
    assert chat(server, messages=messages, tools=[tool]).status == 200
    prompt = bytes(server.engine.requests[0].prompt_token_ids).decode()
    given, end = json.JSONDecoder().raw_decode(prompt)
    assert json.loads(prompt[end:]) == [TOOLS[0]]
    assert [message["role"] for message in given] == ["user", "assistant", "tool", "tool", "tool", "tool"]
    assert given[1]["reasoning_content"] == "hm"
    assert [each["function"] for each in given[1]["tool_calls"]] == [
        {"name": name, "arguments": {"x": 1}} for name in ("add", "get_weather", "add")
    ]
    first, second, third = [each["id"] for each in given[1]["tool_calls"]]
    assert third == "mine"
    assert [message["tool_call_id"] for message in given[2:]] == [second, first, third, "call_unknown"]


@pytest.mark.parametrize("named", [True, False])
def test_many_calls_and_results_take_time_in_proportion(named: bool) -> None:
    num_calls = 20_000
    calls = [OllamaToolCall(function=OllamaFunction(name=f"f{index % 2}")) for index in range(num_calls)]
    results = [OllamaMessage(role="tool", tool_name=f"f{index % 2}" if named else None) for index in range(num_calls)]
    started = time.process_time()
    [called, *answered] = chat_messages([OllamaMessage(role="assistant", tool_calls=calls), *results])
    # Time that grew with the square would be minutes.
    assert time.process_time() - started < 5
    assert called.tool_calls is not None
    assert [message.tool_call_id for message in answered] == [call.id for call in called.tool_calls]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"content": "a"}], ("messages[0].role",)),
        ([{"role": "asistant", "content": "a"}], ("messages[0].role", "assistant")),
        ([*MESSAGES, {"role": "user", "content": "a", "images": ["aGk="]}], ("messages[1].images", "text only")),
        ([{"role": "user", "content": 1}], ("messages[0].content",)),
        ([{"role": "user", "tool_calls": [{"function": {"name": "a"}}]}], ("messages[0].tool_calls",)),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}], ("arguments",)),
        ([{"role": "user", "content": "a" * 300}], ("context length", "messages")),
        (7, ("messages",)),
    ],
)
def test_messages_that_are_wrong(server: RunningServer, messages: Any, words: tuple[str, ...]) -> None:
    assert_ollama_error(chat(server, messages=messages), 400, *words)


def test_a_client_that_leaves_amid_a_stream(server: RunningServer) -> None:
    server.engine.script_end, server.engine.step_seconds = None, 0.001
    body = json.dumps({"model": "test", "messages": MESSAGES}).encode()
    head = f"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = server.raw(head.encode() + body)
    connection.recv(1000)
    connection.close()
    wait_until(lambda: server.engine.cancelled)
    assert server.engine.cancelled == [(0, "client")]
