"""The events of a stream, how it is asked for and read again, and what a client puts together of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.server.conftest import RunningServer

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class SentEvent(NamedTuple):
    """A complete event: its id and its data."""

    id: str
    data: str


def parse(stream: bytes) -> list[SentEvent]:
    """The complete events of what has come of a stream; each must have an id unless it tells of an error."""
    events = []
    for event in stream.split(b"\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.decode().split("\n"))
        events.append(SentEvent(fields.get("id", ""), fields["data"]))
    return events


def dechunked(data: bytes) -> bytes:
    """What has come of a body in chunked encoding."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def request_body(endpoint: str, fields: dict[str, Any]) -> bytes:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if endpoint == "chat" else {"prompt": "hi"}
    )
    fields = {name: value for name, value in fields.items() if endpoint != "chat" or name != "echo"}
    if endpoint == "chat" and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return json.dumps({"model": "test", "stream": True, **prompt, **fields}).encode()


def whole_stream(server: RunningServer, endpoint: str, fields: dict[str, Any]) -> bytes:
    """A stream that nothing interrupts."""
    reply = server.post(PATHS[endpoint], request_body(endpoint, fields))
    assert reply.status == 200, reply.data
    return reply.data


def reply_id_of(stream: bytes) -> str:
    return str(json.loads(parse(stream)[0].data)["id"])


def resume(server: RunningServer, reply_id: str, event_id: str | None = None, **headers: str) -> Any:
    sent = headers if event_id is None else {"Last-Event-ID": event_id, **headers}
    return server.request("GET", f"/v1/stream/{reply_id}", headers=sent)


def joined(events: list[SentEvent]) -> Any:
    """What a client puts together of events, however they were cut into chunks."""
    if not events:
        return None
    choices: dict[int, dict[str, Any]] = {}
    identities, usages = set(), []
    for event in events:
        if event.data == "[DONE]":
            continue
        chunk = json.loads(event.data)
        identities.add((chunk["id"], chunk["object"], chunk["created"], chunk["model"], chunk.get("service_tier")))
        usages += [chunk["usage"]] if not chunk["choices"] else []
        for choice in chunk["choices"]:
            found = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "ids": [], "roles": 0, "ends": []})
            delta = choice.get("delta", {})
            found["text"] += choice.get("text", "") + (delta.get("content") or "")
            found["roles"] += "role" in delta
            logprobs = choice["logprobs"] or {}
            found["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            found["reasoning"] = found.get("reasoning", "") + delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                function = call["function"]
                said = call.get("id", ""), call.get("type", ""), function.get("name", ""), function["arguments"]
                before = found.setdefault("calls", {}).get(call["index"], ("", "", "", ""))
                found["calls"][call["index"]] = tuple(map(str.__add__, before, said))
            found["ids"] += choice.get("token_ids") or []
            found["ends"] += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
    return choices, identities, usages, events[-1].data
