"""Bodies for `POST /v1/responses`, and the named events of its streams."""

from __future__ import annotations

import json
from typing import Any

from eventlm.text.fake_tokenizer import FakeTokenizer
from tests.http_exchange import Reply
from tests.server.conftest import RunningServer
from tests.server.tool_calls import ADD, WEATHER

PATH = "/v1/responses"
TOOLS: list[dict[str, Any]] = [{"type": "function", **tool["function"]} for tool in (WEATHER, ADD)]
LOGPROBS = "message.output_text.logprobs"


def respond(server: RunningServer, **fields: Any) -> Reply:
    return server.post(PATH, {"model": "test", "input": "hi", **fields})


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    reply = respond(server, stream=True, **fields)
    assert reply.status == 200, reply.data
    assert reply.headers["content-type"].startswith("text/event-stream")
    return parse_named(reply.data)


def parse_named(stream: bytes) -> list[dict[str, Any]]:
    events = []
    assert stream.endswith(b"\n\n")
    for event in stream.split(b"\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
        data = json.loads(fields["data"])
        assert data["type"] == fields["event"]
        events.append(data)
    return events


def prompt_of(server: RunningServer, number: int = -1) -> str:
    """The text of the prompt of a request."""
    return FakeTokenizer().decode(server.engine.requests[number].prompt_token_ids)
