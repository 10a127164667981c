"""Streams whose connections are lost: what comes over all of them is what comes over one."""

from __future__ import annotations

import json
import random
import socket
import struct
import urllib.parse
from collections.abc import Callable
from typing import Any

import openai
import pytest

from eventlm.server.stream_events import StreamPosition
from tests.processes import wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell
from tests.server.sent_streams import (
    PATHS,
    SentEvent,
    dechunked,
    joined,
    parse,
    reply_id_of,
    request_body,
    resume,
    whole_stream,
)

TEXT = "Héllo, wörld 🙂🙃 — stop here and say more: 日本語."
CASES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stop": ["stop here"], "stream_options": {"include_usage": True}},
    {"logprobs": 2, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}},
    {"echo": True, "logprobs": 1, "return_token_ids": True, "service_tier": "auto"},
    {"max_tokens": 9, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": ["🙃", "more"], "include_stop_str_in_output": True, "logprobs": 0, "n": 2},
]


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(resume_seconds=30)
    server.engine.script = spell(TEXT, width=2)
    return server


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("fields", CASES)
def test_a_stream_resumes_after_any_event(server: RunningServer, endpoint: str, fields: dict[str, Any]) -> None:
    stream = whole_stream(server, endpoint, fields)
    events = parse(stream)
    assert events[-1].data == "[DONE]"
    ids = [event.id for event in events]
    assert len(set(ids)) == len(ids)
    for index, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert rest.headers["content-type"].startswith("text/event-stream")
        assert joined(parse(rest.data)) == joined(events[index + 1 :]), event.id
    assert resume(server, reply_id_of(stream), events[-1].id).status == 204
    assert joined(parse(resume(server, reply_id_of(stream)).data)) == joined(events)


def test_a_client_that_is_ahead_of_a_rewound_stream_gets_no_other_text(server: RunningServer) -> None:
    stream = whole_stream(server, "chat", {})
    events, reply_id = parse(stream), reply_id_of(stream)
    outputs_before = [event.id for event in events if event.id.isdecimal()]
    reply = server.engine.registry.find(reply_id, "")
    left = int(outputs_before[4])
    reply.rewinds = [left]
    for index, event in enumerate(events[:-1]):
        rest = resume(server, reply_id, event.id)
        if StreamPosition.parse(event.id).end > left:
            assert_error(rest, 409, "invalid_request_error", code="stream_rewound", message=f"at most {left}")
            assert (rest.headers["x-resume-from"], rest.headers["x-should-retry"]) == (str(left), "false")
            continue
        again = parse(rest.data)
        assert joined(again) == joined(events[index + 1 :])
        assert all(each.id.endswith("~1") for each in again)
        # Those ids are of the stream as it is now.
        assert joined(parse(resume(server, reply_id, again[0].id).data)) == joined(again[1:])
    assert resume(server, reply_id, f"{left}~2").status == 400
    reply.rewinds = [left, left - 2]
    assert resume(server, reply_id, f"{left}~1").headers["x-resume-from"] == str(left - 2)
    assert resume(server, reply_id, f"{left - 2}~1").status == 200


def test_tool_calls_and_reasoning_go_on(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 4096
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "Zürich 🙂"}}\n</tool_call>'
    server.engine.script = spell(f"<think>Hm, é?</think>Let me see.\n{call}\n{call}", width=3)
    stream = whole_stream(server, "chat", {"tools": [{"type": "function", "function": {"name": "look"}}]})
    events = parse(stream)
    whole = joined(events)[0][0]
    assert (whole["reasoning"], whole["text"]) == ("Hm, é?", "Let me see.")
    assert [name for _, _, name, _ in whole["calls"].values()] == ["look", "look"]
    assert whole["ends"] == [("tool_calls", None)]
    for index, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert joined(parse(rest.data)) == joined(events[index + 1 :]), event.id


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_connection_that_breaks_at_any_byte(server: RunningServer, endpoint: str) -> None:
    """Several times in one stream, while it is generated and after."""
    draw = random.Random(endpoint)
    for _ in range(40):
        fields = draw.choice(CASES) | {"seed": 1}
        server.engine.step_seconds = draw.choice([0.0, 0.0, 0.0005])
        whole = joined(parse(whole_stream(server, endpoint, fields)))
        got = broken_stream(server, endpoint, fields, draw)
        assert without_identity(joined(got)) == without_identity(whole)
        assert len({event.id for event in got}) == len(got)
    wait_until(lambda: server.context.num_running == 0)


def without_identity(found: Any) -> Any:
    choices, identities, *rest = found
    assert len(identities) == 1
    return choices, rest


def broken_stream(server: RunningServer, endpoint: str, fields: dict[str, Any], draw: random.Random) -> list[SentEvent]:
    """The events of a stream whose connections are lost after random numbers of bytes; the first shows an event."""
    head = f"POST {PATHS[endpoint]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = request_body(endpoint, fields)
    sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    events = read_some(server, sent, draw.randrange(3000), 1)
    reply_id = json.loads(events[0].data)["id"]
    while events[-1].data != "[DONE]":
        head = f"GET /v1/stream/{reply_id} HTTP/1.1\r\nHost: x\r\nLast-Event-ID: {events[-1].id}\r\n\r\n"
        events += read_some(server, head.encode(), draw.choice([500, 3_000, 40_000]) + draw.randrange(3_000), 0)
    return events


def read_some(server: RunningServer, sent: bytes, num_bytes: int, num_events: int) -> list[SentEvent]:
    """The complete events among the first so many bytes of a reply, or as many more as make so many events."""
    connection = server.raw(sent)
    if num_bytes % 2:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    data = b""
    while b"\r\n0\r\n\r\n" not in data:
        received = connection.recv(num_bytes - len(data) if num_bytes > len(data) else 64)
        assert received, data
        data += received
        if len(data) >= num_bytes and len(parse(dechunked(data))) >= num_events:
            break
    connection.close()
    return parse(dechunked(data))


@pytest.mark.parametrize("value", ["x", "-1", "1-", "3-2.1", "1.5", "9" * 16, "١", ""])
def test_what_is_no_id(server: RunningServer, value: str) -> None:
    stream = whole_stream(server, "chat", {})
    query = f"/v1/stream/{reply_id_of(stream)}?from={urllib.parse.quote(value)}"
    assert_error(server.request("GET", query), 400, INVALID, "from", "invalid_value")


def test_an_id_that_no_event_has_had(server: RunningServer) -> None:
    stream = whole_stream(server, "chat", {})
    for value in ("9999", "9000-9999.1"):
        reply = resume(server, reply_id_of(stream), value)
        assert_error(reply, 400, INVALID, "Last-Event-ID", "invalid_value")
        reply = server.request("GET", f"/v1/stream/{reply_id_of(stream)}?from={value}")
        assert_error(reply, 400, INVALID, "from", "invalid_value")
    # The header is what a browser sends when it comes again to an address with the other.
    last = parse(stream)[-1].id
    reply = server.request("GET", f"/v1/stream/{reply_id_of(stream)}?from=0", headers={"Last-Event-ID": last})
    assert reply.status == 204


def test_unknown_replies(server: RunningServer) -> None:
    assert_error(resume(server, "chatcmpl-0"), 404, INVALID)
    assert_error(server.request("DELETE", "/v1/stream/chatcmpl-0"), 404, INVALID)
    whole = server.chat().json()["id"]
    assert_error(resume(server, whole), 404, INVALID)
    assert_error(server.request("POST", "/v1/stream/x"), 405, INVALID, code="method_not_supported")


def test_a_stream_that_is_over_is_ended_for_good(server: RunningServer) -> None:
    reply_id = reply_id_of(whole_stream(server, "chat", {}))
    assert resume(server, reply_id).status == 200
    ended = server.request("DELETE", f"/v1/stream/{reply_id}")
    assert ended.json() == {"id": reply_id, "object": "stream", "cancelled": False}
    assert server.engine.registry.num_bytes == 0
    assert_error(resume(server, reply_id), 404, INVALID)
    assert_error(server.request("DELETE", f"/v1/stream/{reply_id}"), 404, INVALID)


def test_what_is_over_and_not_kept_cannot_be_ended(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    for reply_id in (reply_id_of(whole_stream(server, "chat", {})), server.chat().json()["id"]):
        assert_error(resume(server, reply_id), 404, INVALID)
        assert_error(server.request("DELETE", f"/v1/stream/{reply_id}"), 404, INVALID)
    assert server.engine.cancelled == []


def test_memory_is_bounded(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, resume_memory="8KiB")
    streams = [whole_stream(server, "chat", {}) for _ in range(20)]
    statuses = [resume(server, reply_id_of(stream)).status for stream in streams]
    assert statuses == sorted(statuses, reverse=True)
    assert {200, 404} == set(statuses)
    assert server.engine.registry.num_bytes <= 8 * 1024


def test_the_official_client_reads_the_events(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chunks = list(client.completions.create(model="test", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert_serves_after_all(server, chunks[0].id)


def assert_serves_after_all(server: RunningServer, reply_id: str) -> None:
    choices, *_ = joined(parse(resume(server, reply_id).data))
    assert choices[0]["text"] == TEXT


def test_calls_that_are_resumed_are_the_same_calls(server: RunningServer) -> None:
    """With their ids, wherever the connection was lost."""
    server.engine.max_model_len = 4096
    call = '<tool_call>\n{"name": "add", "arguments": {"a": "Zürich 🙂"}}\n</tool_call>'
    server.engine.script = spell(f"So:\n{call}\n{call}", width=3)
    fields = {"tools": [{"type": "function", "function": {"name": "add"}}]}
    stream = whole_stream(server, "chat", fields)
    events = parse(stream)
    assert sum('"id":"call_' in event.data for event in events) == 2
    for index, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert joined(parse(rest.data)) == joined(events[index + 1 :]), event.id


def test_while_the_engine_loads_nobody_is_told_that_a_reply_is_gone(server: RunningServer) -> None:
    stream = whole_stream(server, "completions", {})
    path = f"/v1/stream/{reply_id_of(stream)}"
    server.engine.state = "loading"
    for method in ("GET", "DELETE"):
        reply = server.request(method, path)
        assert reply.status == 503
        assert "retry-after" in reply.headers
    server.engine.state = "ready"
    assert server.request("GET", path).status == 200
