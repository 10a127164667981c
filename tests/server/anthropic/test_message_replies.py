"""The events of streams, as tables, and the same messages without streaming."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.processes import wait_until
from tests.server.anthropic.conftest import Start
from tests.server.anthropic.conversations import (
    ADD_CALL,
    CALL,
    INPUT,
    MESSAGES,
    PATH,
    TOOLS,
    Row,
    events_of,
    rows,
    send,
)
from tests.server.engine_double import spell
from tests.server.sent_streams import dechunked

STRICT_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
START, PING, STOP = ("message_start",), ("ping",), ("message_stop",)


def block(index: int, kind: str, *deltas: tuple[str, str]) -> list[Row]:
    """The rows of one block."""
    first = [("content_block_start", index, kind), *([] if index else [PING])]
    return [*first, *((name, index, text) for name, text in deltas), ("content_block_stop", index)]


def text_block(index: int, text: str) -> list[Row]:
    return block(index, "text", ("text_delta", text))


def thinking_block(index: int, text: str) -> list[Row]:
    return block(index, "thinking", ("thinking_delta", text), ("signature_delta", "..."))


def call_block(index: int, name: str, text: str) -> list[Row]:
    return block(index, name, ("input_json_delta", text))


def call_with(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


THOUGHT = "<think>\nHm, 日本?\n</think>\n\n"
#: What the model says, fields of the body, the rows of the blocks, stop reason and stop sequence.
STREAMS: dict[str, tuple[str, dict[str, Any], list[Row], str, str | None]] = {
    "text": ("Héllo 🙂", {}, text_block(0, "Héllo 🙂"), "end_turn", None),
    "nothing": ("", {}, [], "end_turn", None),
    "thinking and text": (
        f"{THOUGHT}Yes.",
        {},
        [*thinking_block(0, "Hm, 日本?"), *text_block(1, "Yes.")],
        "end_turn",
        None,
    ),
    "thinking that is cut short": (
        f"{THOUGHT}Yes.",
        {"max_tokens": 11},
        thinking_block(0, "Hm,"),
        "max_tokens",
        None,
    ),
    "thinking that is omitted": (
        f"{THOUGHT}Yes.",
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        [*block(0, "thinking", ("signature_delta", "...")), *text_block(1, "Yes.")],
        "end_turn",
        None,
    ),
    "thinking that is not wanted": (
        f"{THOUGHT}Yes.",
        {"thinking": {"type": "disabled"}},
        text_block(0, "Yes."),
        "end_turn",
        None,
    ),
    "one tool": (CALL, {"tools": TOOLS}, call_block(0, "get_weather", INPUT), "tool_use", None),
    "two tools": (
        f"{THOUGHT}Let me see.\n{CALL}\n{ADD_CALL}",
        {"tools": TOOLS},
        [
            *thinking_block(0, "Hm, 日本?"),
            *text_block(1, "Let me see."),
            *call_block(2, "get_weather", INPUT),
            *call_block(3, "add", '{"a": 1}'),
        ],
        "tool_use",
        None,
    ),
    "text after a tool": (
        f"{ADD_CALL}\nAnd{CALL}",
        {"tools": TOOLS},
        [*call_block(0, "add", '{"a": 1}'), *text_block(1, "\nAnd"), *call_block(2, "get_weather", INPUT)],
        "tool_use",
        None,
    ),
    "one tool at most": (
        f"{ADD_CALL}\n{CALL}",
        {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        call_block(0, "add", '{"a": 1}'),
        "tool_use",
        None,
    ),
    "a forced tool": (
        ADD_CALL,
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
        call_block(0, "add", '{"a": 1}'),
        "tool_use",
        None,
    ),
    "a tool that is cut short": (
        ADD_CALL,
        {"tools": TOOLS, "max_tokens": 46},
        block(0, "add"),
        "max_tokens",
        None,
    ),
    "arguments that are no JSON": (
        "".join(map(call_with, ('{"a": nothing}', '{"a": 01, b}', '{"a": 1]', '{"a": 1}'))),
        {"tools": TOOLS},
        [*block(0, "add"), *block(1, "add"), *block(2, "add"), *call_block(3, "add", '{"a": 1}')],
        "tool_use",
        None,
    ),
    "stop sequence": (
        "One, two, three",
        {"stop_sequences": ["x", ", three"]},
        text_block(0, "One, two"),
        "stop_sequence",
        ", three",
    ),
    "stop sequence at once": ("One", {"stop_sequences": ["One"]}, [], "stop_sequence", "One"),
    "max tokens": ("One, two, three", {"max_tokens": 8}, text_block(0, "One, two"), "max_tokens", None),
    "end of the context": (
        "x" * 5000,
        {"max_tokens": 100_000},
        text_block(0, "x" * (4096 - 21)),
        "model_context_window_exceeded",
        None,
    ),
}


@pytest.mark.parametrize("width", [1, 5, 10_000])
@pytest.mark.parametrize("name", STREAMS)
def test_streams(start_with_anthropic: Start, name: str, width: int) -> None:
    text, fields, expected, reason, sequence = STREAMS[name]
    server, client = start_with_anthropic(reasoning_parser="qwen3")
    server.engine.script = spell(text, width=width)
    events = events_of(send(server, stream=True, **fields))
    for event in events:
        if event["type"] != "ping":
            STRICT_EVENT.validate_python(event, strict=True)
    usage = events[-2]["usage"]
    assert rows(events) == [START, *expected, ("message_delta", reason, sequence), STOP]

    # Without streaming, and put together by the client, it is the same message.
    whole = send(server, **fields).json()
    Message.model_validate(whole, strict=True)
    assert whole["usage"] == usage
    body: Any = {"model": "test", "max_tokens": 1000, "messages": MESSAGES, **fields}
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert final.model_dump(exclude_unset=True)["usage"] == usage
    assert (final.stop_reason, final.stop_sequence) == (whole["stop_reason"], whole["stop_sequence"])
    assert without_ids(final.model_dump(exclude_unset=True)) == without_ids(whole)


def without_ids(message: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("type", "text", "thinking", "name", "input")
    return [{name: block[name] for name in names if name in block} for block in message["content"]]


def test_a_long_input_of_a_tool_shows_signs_of_life(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic()
    arguments = json.dumps({"text": "a" * 800})
    server.engine.script = spell(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>', width=5)
    types = [event["type"] for event in events_of(send(server, stream=True, tools=TOOLS))]
    start, delta = types.index("content_block_start"), types.index("content_block_delta")
    # The first comes with every stream's first block.
    assert types[start + 1 : delta] == ["ping"] * 4


def test_a_whole_message(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic(reasoning_parser="qwen3")
    server.engine.script = spell(f"{THOUGHT}Let me see.\n{ADD_CALL}")
    reply = send(server, tools=TOOLS).json()
    thinking, text, call = reply["content"]
    prompt_tokens = len(server.engine.requests[-1].prompt_token_ids)
    assert thinking == {"type": "thinking", "thinking": "Hm, 日本?", "signature": thinking["signature"]}
    assert text == {"type": "text", "text": "Let me see."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "add", "input": {"a": 1}}
    assert call["id"].startswith("toolu_")
    assert thinking["signature"]
    del reply["content"]
    assert reply == {
        "id": reply["id"],
        "type": "message",
        "role": "assistant",
        "model": "test",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": len(f"{THOUGHT}Let me see.\n{ADD_CALL}".encode()),
            "output_tokens_details": {"thinking_tokens": len("\nHm, 日本?\n".encode())},
            "service_tier": "standard",
        },
    }
    assert reply["id"].startswith("msg_")


def test_an_error_in_the_middle(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic()
    server.engine.script = spell("Hello")
    for reason, by, type_, message in (
        ("cancelled", "shutdown", "overloaded_error", "The server ended this request before it was complete."),
        ("cancelled", "owner", "api_error", "This request was cancelled by its owner."),
        ("deadline", "", "timeout_error", "The request's deadline cannot be met."),
    ):
        server.engine.script_end = reason  # type: ignore[assignment]
        server.engine.cancelled_by[len(server.engine.requests)] = by
        found = rows(events_of(send(server, stream=True)))
        assert found == [START, *text_block(0, "Hello")[:-1], ("error", type_, message)]


@pytest.mark.parametrize(
    ("text", "delta"), [("Hello", b"text_delta"), ("<think>Hm", b"thinking_delta"), (CALL[:50], b"tool_use")]
)
def test_a_client_that_leaves(start_with_anthropic: Start, text: str, delta: bytes) -> None:
    server, _ = start_with_anthropic(reasoning_parser="qwen3")
    server.engine.step_seconds = 0.001
    server.engine.script = spell(text)
    server.engine.script_end = None
    body = json.dumps(
        {"model": "test", "max_tokens": 3000, "messages": MESSAGES, "tools": TOOLS, "stream": True}
    ).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.raw(head.encode() + body) as connection:
        received = b""
        while delta not in dechunked(received):
            received += connection.recv(4096)
    wait_until(lambda: server.context.num_running == 0)
    assert server.engine.cancelled == [(0, "client")]
    assert not server.context._live


def test_timings(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic()
    plain, timed = (send(server, stream=True, eventlm={"timings": timings}) for timings in (False, True))
    assert "eventlm" not in events_of(plain)[-2]
    assert events_of(timed)[-2]["eventlm"] == {"timings": []}
    assert send(server, eventlm={"timings": True}).json()["eventlm"] == {"timings": []}
