"""What is said in the tests of Anthropic's API, and the events of a stream in a form for tables."""

from __future__ import annotations

import json
from typing import Any

from tests.http_exchange import Reply
from tests.server.conftest import RunningServer

PATH = "/v1/messages"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
ADD: Any = {"name": "add", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, ADD]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🙂", "days": 2}}\n</tool_call>'
INPUT = '{"city": "Zürich 🙂", "days": 2}'
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

#: An event's name and what it tells.
Row = tuple[Any, ...]


def send(server: RunningServer, **fields: Any) -> Reply:
    """A request for a message."""
    return server.post(PATH, {"model": "test", "max_tokens": 1000, "messages": MESSAGES, **fields})


def prompt_of(server: RunningServer) -> str:
    """The prompt of the last request."""
    return str(server.context.tokenizer.decode(server.engine.requests[-1].prompt_token_ids))


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream. Each is named as its data says."""
    assert reply.status == 200, reply.data
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    for text in reply.data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        data = json.loads(fields["data"])
        assert fields["event"] == data["type"]
        found.append(data)
    return found


def rows(events: list[dict[str, Any]]) -> list[Row]:
    """One row an event, but one for all consecutive deltas of a kind. Ids and usage are left out."""
    found: list[Row] = []
    for event in events:
        row = _row(event)
        if found and row[0].endswith("_delta") and found[-1][:2] == row[:2]:
            found[-1] = (*row[:2], found[-1][2] + row[2])
        else:
            found.append(row)
    return found


def _row(event: dict[str, Any]) -> Row:
    match event:
        case {"type": "message_start", "message": {"content": [], "stop_reason": None}}:
            return ("message_start",)
        case {"type": "content_block_start", "index": index, "content_block": block}:
            empty: dict[str, dict[str, Any]] = {
                "text": {"text": ""},
                "thinking": {"thinking": "", "signature": ""},
                "tool_use": {"input": {}},
            }
            assert block.items() >= empty[block["type"]].items()
            return "content_block_start", index, block.get("name", block["type"])
        case {"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta", "signature": text}}:
            assert text
            return "signature_delta", index, "..."
        case {"type": "content_block_delta", "index": index, "delta": delta}:
            type_ = delta.pop("type")
            [text] = delta.values()
            return type_, index, text
        case {"type": "content_block_stop", "index": index}:
            return "content_block_stop", index
        case {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}}:
            return "message_delta", reason, sequence
        case {"type": "error", "error": {"type": type_, "message": message}}:
            return "error", type_, message
        case {"type": "ping" | "message_stop" as type_}:
            assert len(event) == 1
            return (type_,)
    raise AssertionError(event)
