"""Who reads a stream: those that take it over, those that left, and what becomes of one that nobody reads."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest

from eventlm.engine.request import EngineUnavailableError
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs
from tests.server.engine_double import spell
from tests.server.sent_streams import SentEvent, dechunked, joined, parse, reply_id_of, request_body, resume


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(resume_seconds=30)


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


def ends_of_the_request(logs: list[Any]) -> list[Any]:
    """The lines of requests that their owner ended. Replies that go on without a client have lines of their own."""
    return [line for line in list(logs) if line["event"] == "request" and line.get("error_status") == 499]


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
        wait_until(lambda: ends_of_the_request(logs) != [])
    assert (error["code"], error["type"]) == ("cancelled", INVALID)
    assert error["message"] == "This request was cancelled by its owner."
    assert server.engine.cancelled == [(0, "owner")]
    # Nobody has failed.
    [line] = ends_of_the_request(logs)
    assert (line["log_level"], line["outcome"]) == ("info", "cancelled")
    wait_until(lambda: server.context.num_running == 0)
    assert resume(server, reply_id).status == 404


def test_a_stop_string_is_found_although_the_reader_before_does_not_read(
    start_server: Callable[..., RunningServer],
) -> None:
    """Who stalls and comes back must not wait until the connection that it has lost is given up."""
    server = start_server(resume_seconds=30, max_stream_buffer="4KiB")
    server.engine.script = spell("".join(f"{number} words, " for number in range(6_000)), width=3)
    server.engine.script_end = None
    server.engine.max_model_len = 200_000
    # Not as far as the stop string until there is somebody to read it.
    server.engine.most_said = 30_000
    body = request_body("chat", {"max_tokens": 150_000, "stop": ["5990 w"]})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    stalled.connect((server.host, server.port))
    stalled.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    data = b""
    while not parse(dechunked(data)):
        data += stalled.recv(1000)
    wait_until(lambda: server.engine.num_said >= 30_000)
    assert not server.engine.text_ends
    again = open_stream(server, reply_id_of(dechunked(data)))
    server.engine.most_said = math.inf
    choice = json.loads(read_to_end(again)[-2].data)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "5990 w")
    for event in read_to_end(stalled)[-2:-1]:
        assert json.loads(event.data)["error"]["code"] == "taken_over"


def test_a_stop_string_is_found_without_a_reader(server: RunningServer) -> None:
    server.engine.script = spell("Héllo, wörld 🙂🙃 — say more: 日本語.", width=2)
    connection, reply_id = start_endless(server, stop=["more"])
    connection.close()
    wait_until(lambda: bool(server.engine.text_ends))
    wait_until(lambda: server.context.num_running == 0)
    choices, *_ = joined(parse(resume(server, reply_id).data))
    assert (choices[0]["text"], choices[0]["ends"]) == ("Héllo, wörld 🙂🙃 — say ", [("stop", "more")])


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


def test_a_client_without_the_id_cannot_resume(server: RunningServer) -> None:
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
        num_groups, num_cancelled = server.engine.num_groups, len(server.engine.cancelled)
        connection = server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda num=num_groups: server.engine.num_groups > num)
        if not submit_seconds:
            wait_until(lambda: bool(server.engine.requests))
        connection.close()
        wait_until(lambda num=num_cancelled: len(server.engine.cancelled) > num)
    wait_until(lambda: [len(reply.readers) for reply in server.engine.registry._replies.values()] == [0, 0])


def test_a_stream_can_be_resumed_by_its_requests_id(server: RunningServer) -> None:
    connection, reply_id = start_endless(server, headers="x-request-id: mine\r\n")
    connection.close()
    resumed = open_stream(server, "mine")
    assert list(server.engine.registry.find(reply_id, "").readers) == [1]
    resumed.close()
    wait_until(lambda: server.engine.registry.find(reply_id, "").readers == {})


@pytest.mark.parametrize("quoted", ["jobs/7", "jobs%2F7", "jobs/7/explain", "a%2F%2Fb+c=d@e"])
def test_an_id_with_slashes_is_found_plain_and_quoted(server: RunningServer, quoted: str) -> None:
    connection, reply_id = start_endless(server, headers=f"x-request-id: {urllib.parse.unquote(quoted)}\r\n")
    open_stream(server, quoted).close()
    connection.close()
    assert server.request("DELETE", f"/v1/stream/{quoted}").json()["cancelled"]
    wait_until(lambda: not server.engine.registry.find(reply_id, "").num_unfinished)


def test_head_takes_nothing_over(server: RunningServer) -> None:
    connection, reply_id = start_endless(server)
    assert server.request("HEAD", f"/v1/stream/{reply_id}").status == 405
    assert b"error" not in connection.recv(65536)
    connection.close()


def test_a_server_that_shuts_down_lets_streams_be_resumed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(resume_seconds=30, drain_seconds=600)
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
    drained.result(PATIENCE_SECONDS)
    assert server.engine.cancelled == [(0, "shutdown")]


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


def test_a_stream_that_died_with_the_engine_cannot_be_resumed(server: RunningServer) -> None:
    connection, _ = start_endless(server)
    server.loop.call_soon_threadsafe(server.engine.fail, EngineUnavailableError("the engine has died"))
    assert read_to_end(connection)[-1].data == "[DONE]"
    # A shutdown waits for what runs.
    wait_until(lambda: server.context.num_running == 0)
