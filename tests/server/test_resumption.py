"""Streams whose connections are lost: what comes over all of them is what comes over one."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

import openai
import pytest

from eventlm.control.request import EngineUnavailableError

from .conftest import INVALID, RunningServer, assert_error, capture_logs, wait_until
from .engine_double import spell

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


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(resume_seconds=30)
    server.engine.script = spell(TEXT, width=2)
    return server


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("fields", CASES)
def test_behind_every_event_the_rest_is_the_rest(server: RunningServer, endpoint: str, fields: dict[str, Any]) -> None:
    stream = whole_stream(server, endpoint, fields)
    events = parse(stream)
    assert events[-1].data == "[DONE]"
    ids = [event.id for event in events]
    assert len(set(ids)) == len(ids)
    for place, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert rest.headers["content-type"].startswith("text/event-stream")
        assert joined(parse(rest.data)) == joined(events[place + 1 :]), event.id
    assert resume(server, reply_id_of(stream), events[-1].id).status == 204
    assert joined(parse(resume(server, reply_id_of(stream)).data)) == joined(events)


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
            for call in delta.get("tool_calls", []):
                told = found.setdefault(f"call {call['index']}", {"function": {"arguments": ""}})
                arguments = told["function"]["arguments"] + call["function"]["arguments"]
                told |= call | {"function": told["function"] | call["function"] | {"arguments": arguments}}
            found["text"] += choice.get("text", "") + (delta.get("content") or "")
            found["roles"] += "role" in delta
            logprobs = choice["logprobs"] or {}
            found["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            found["reasoning"] = found.get("reasoning", "") + delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                said = call.get("id", ""), call["function"].get("name", ""), call["function"]["arguments"]
                before = found.setdefault("calls", {}).get(call["index"], ("", "", ""))
                found["calls"][call["index"]] = tuple(map(str.__add__, before, said))
            found["ids"] += choice.get("token_ids") or []
            found["ends"] += [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []
    return choices, identities, usages, events[-1].data


def test_tool_calls_and_reasoning_go_on(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 4096
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "Zürich 🙂"}}\n</tool_call>'
    server.engine.script = spell(f"<think>Hm, é?</think>Let me see.\n{call}\n{call}", width=3)
    stream = whole_stream(server, "chat", {"tools": [{"type": "function", "function": {"name": "look"}}]})
    events = parse(stream)
    whole = joined(events)[0][0]
    assert (whole["reasoning"], whole["text"]) == ("Hm, é?", "Let me see.")
    assert [name for _, name, _ in whole["calls"].values()] == ["look", "look"]
    assert whole["ends"] == [("tool_calls", None)]
    for place, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert joined(parse(rest.data)) == joined(events[place + 1 :]), event.id


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


def dechunked(data: bytes) -> bytes:
    """What has come of a body in chunked encoding."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def start_endless(server: RunningServer, headers: str = "", **fields: Any) -> tuple[socket.socket, str]:
    """A stream that goes on, of which at least an event has come."""
    server.engine.script_end = None
    server.engine.step_seconds = 0.002
    server.engine.max_model_len = 20_000
    body = request_body("chat", {"max_tokens": 10_000, **fields})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    connection = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data = b""
    while not parse(dechunked(data)):
        data += connection.recv(65536)
    return connection, reply_id_of(dechunked(data))


def read_to_end(connection: socket.socket) -> list[SentEvent]:
    """The events of what is yet to come, but for one that may have begun."""
    data = b""
    while not data.endswith(b"\n0\r\n\r\n"):
        received = connection.recv(65536)
        assert received
        data += received
    connection.close()
    events = [event for event in data.replace(b"\r\n", b"\n").split(b"\n\n") if b"data: " in event]
    return parse(b"\n\n".join(event[event.index(b"data: ") :] for event in events) + b"\n\n")


def open_stream(server: RunningServer, reply_id: str) -> socket.socket:
    connection = server.raw(f"GET /v1/stream/{reply_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def test_the_newer_reader_takes_over(server: RunningServer) -> None:
    first, reply_id = start_endless(server)
    second = open_stream(server, reply_id)
    end = [json.loads(event.data) for event in read_to_end(first)[-2:-1]]
    assert [each["error"]["code"] for each in end] == ["taken_over"]
    third = open_stream(server, reply_id)
    assert json.loads(read_to_end(second)[-2].data)["error"]["code"] == "taken_over"
    assert server.engine.cancelled == []
    with capture_logs() as logs:
        assert server.request("DELETE", f"/v1/stream/{reply_id}").json() == {
            "id": reply_id,
            "object": "stream",
            "cancelled": True,
        }
        error = json.loads(read_to_end(third)[-2].data)["error"]
        wait_until(lambda: any("outcome" in line for line in list(logs)))
    assert (error["code"], error["type"]) == ("cancelled", INVALID)
    assert error["message"] == "This request was cancelled by its owner."
    assert server.engine.cancelled == [(0, "owner")]
    # Nobody has failed.
    [line] = [line for line in logs if "outcome" in line]
    assert (line["log_level"], line["outcome"], line["error_status"]) == ("info", "cancelled", 499)
    wait_until(lambda: server.context.num_running == 0)
    assert json.loads(parse(resume(server, reply_id).data)[-2].data)["error"] == error


def test_a_stop_string_is_found_without_a_reader(server: RunningServer) -> None:
    server.engine.step_seconds = 0.002
    connection, reply_id = start_endless(server, stop=["more"])
    connection.close()
    wait_until(lambda: bool(server.engine.text_ends))
    wait_until(lambda: server.context.num_running == 0)
    choices, *_ = joined(parse(resume(server, reply_id).data))
    assert (choices[0]["text"], choices[0]["ends"]) == (TEXT[: TEXT.index("more")], [("stop", "more")])


def test_without_a_reader_it_ends_after_a_while(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=1)
    connection, reply_id = start_endless(server)
    left = time.monotonic()
    connection.close()
    wait_until(lambda: server.engine.cancelled == [(0, "client")])
    assert time.monotonic() - left >= 1
    wait_until(lambda: server.context.num_running == 0)
    assert_error(resume(server, reply_id), 404, INVALID, message=reply_id)


def test_without_resume_seconds_it_ends_at_once(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    connection, reply_id = start_endless(server)
    assert b"id: " not in connection.recv(65536)
    connection.close()
    wait_until(lambda: server.engine.cancelled == [(0, "client")])
    assert_error(resume(server, reply_id), 404, INVALID)


def test_who_never_heard_the_id_cannot_come_back(server: RunningServer) -> None:
    server.engine.script_end = None
    server.engine.step_seconds = 30
    body = request_body("chat", {})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: bool(server.engine.requests))
    connection.close()
    wait_until(lambda: server.engine.cancelled == [(0, "client")])


def test_who_left_before_the_first_event_is_no_reader(server: RunningServer) -> None:
    server.engine.script_end = None
    body = request_body("chat", {})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for submit_seconds, step_seconds in ((0.0, 30.0), (0.05, 30.0)):
        server.engine.submit_seconds, server.engine.step_seconds = submit_seconds, step_seconds
        num_cancelled = len(server.engine.cancelled)
        connection = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.context.num_running == 1)
        if not submit_seconds:
            wait_until(lambda: bool(server.engine.requests))
        connection.close()
        wait_until(lambda num=num_cancelled: len(server.engine.cancelled) > num)
    wait_until(lambda: [reply.reader for reply in server.engine.registry._replies.values()] == [None, None])


def test_a_stream_can_be_resumed_by_its_requests_id(server: RunningServer) -> None:
    connection, reply_id = start_endless(server, headers="x-request-id: mine\r\n")
    connection.close()
    resumed = open_stream(server, "mine")
    assert server.engine.registry.find(reply_id, "").reader == 1
    resumed.close()
    wait_until(lambda: server.engine.registry.find(reply_id, "").reader is None)


@pytest.mark.parametrize("quoted", ["jobs/7", "jobs%2F7", "jobs/7/explain", "a%2F%2Fb+c=d@e"])
def test_an_id_with_slashes_is_found_plain_and_quoted(server: RunningServer, quoted: str) -> None:
    connection, reply_id = start_endless(server, headers=f"x-request-id: {urllib.parse.unquote(quoted)}\r\n")
    open_stream(server, quoted).close()
    connection.close()
    assert server.request("DELETE", f"/v1/stream/{quoted}").json()["cancelled"]
    wait_until(lambda: not server.engine.registry.find(reply_id, "").num_unfinished)


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


def test_head_takes_nothing_over(server: RunningServer) -> None:
    connection, reply_id = start_endless(server)
    assert server.request("HEAD", f"/v1/stream/{reply_id}").status == 405
    assert b"error" not in connection.recv(65536)
    connection.close()


def test_a_server_that_shuts_down_lets_streams_be_resumed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, drain_seconds=20)
    connection, reply_id = start_endless(server)
    connection.close()
    cut = asyncio.Event()
    drained = asyncio.run_coroutine_threadsafe(server.context.drain(cut), server.loop)
    wait_until(lambda: server.context.draining)
    assert_error(server.chat(), 503, "server_error")
    resumed = open_stream(server, reply_id)
    assert not drained.done()
    # A second signal ends what still goes on.
    server.loop.call_soon_threadsafe(cut.set)
    error, done = read_to_end(resumed)[-2:]
    assert json.loads(error.data)["error"]["type"] == "server_error"
    assert done.data == "[DONE]"
    drained.result(10)
    assert server.engine.cancelled == [(0, "shutdown")]


def test_memory_is_bounded(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, resume_memory="8KiB")
    streams = [whole_stream(server, "chat", {}) for _ in range(20)]
    statuses = [resume(server, reply_id_of(stream)).status for stream in streams]
    assert statuses == sorted(statuses, reverse=True)
    assert {200, 404} == set(statuses)
    assert server.engine.registry.num_bytes <= 8 * 1024


def test_an_error_ends_a_resumed_stream_too(server: RunningServer) -> None:
    connection, reply_id = start_endless(server)
    resumed = open_stream(server, reply_id)
    read_to_end(connection)
    server.loop.call_soon_threadsafe(server.engine.fail, EngineUnavailableError("the engine has died"))
    error, done = read_to_end(resumed)[-2:]
    assert json.loads(error.data)["error"]["type"] == "server_error"
    assert (error.id, done) == ("", SentEvent("", "[DONE]"))
    wait_until(lambda: server.context.num_running == 0)
    assert resume(server, reply_id).status == 404


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
    for place, event in enumerate(events[:-1]):
        rest = resume(server, reply_id_of(stream), event.id)
        assert joined(parse(rest.data)) == joined(events[place + 1 :]), event.id
