"""Clients that read slowly or not at all: what waits for them is bounded, nothing is lost, nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eventlm.config import ServerConfig
from eventlm.engine.request import EngineUnavailableError
from eventlm.server.http.event_stream import EventStream
from eventlm.server.reply_format import JSON_LINES, SERVER_SENT_EVENTS
from eventlm.text.detokenizer import SequenceText
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import RunningServer, capture_logs
from tests.server.engine_double import spell

TEXT = "".join(f"{number} wörds, " for number in range(500))


def connect(server: RunningServer, **fields: Any) -> socket.socket:
    """A client with a small window that has sent its request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(PATIENCE_SECONDS)
    client.connect((server.host, server.port))
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "test", "messages": messages, "stream": True, "max_tokens": 100_000, **fields}
    body = json.dumps(fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def read_reply(client: socket.socket, *, most_bytes: int = 65536) -> bytes:
    """A chunked reply's body; the connection stays open."""
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        received = client.recv(most_bytes)
        assert received, data[-200:]
        data += received
    _, _, rest = data.partition(b"\r\n\r\n")
    pieces = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(pieces)


def chunks_of(body: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return prepared(start_server(max_stream_buffer="4KiB"))


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_stream_in_the_old_protocol_ends_with_its_connection(
    start_server: Callable[..., RunningServer], connection: str
) -> None:
    server = start_server(idle_timeout_seconds=10 * int(PATIENCE_SECONDS))
    body = b'{"model": "test", "prompt": "hi", "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\nConnection: {connection}\r\nContent-Type: application/json\r\n"
    with server.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) as client:
        data = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, events = data.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.0 200 ")
    assert "keep-alive" not in head.lower()
    assert chunks_of(events.encode())[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.fixture
def impatient(start_server: Callable[..., RunningServer]) -> RunningServer:
    return prepared(start_server(max_stream_buffer="4KiB", write_timeout_seconds=1))


def prepared(server: RunningServer) -> RunningServer:
    server.engine.max_model_len = 1_000_000
    server.engine.script = spell(TEXT, width=3)
    return server


def test_what_comes_while_a_client_does_not_read_is_joined(server: RunningServer) -> None:
    num_tokens = len(TEXT.encode())
    client = connect(server, logprobs=True)
    # All is generated, and most of it waits.
    wait_until(lambda: server.engine.num_said == num_tokens)
    chunks = chunks_of(read_reply(client))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]) == TEXT.encode()
    assert len(chunks) < num_tokens / 3 / 4
    assert choices[-1]["finish_reason"] == "stop"
    client.close()


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_string_is_found_while_a_client_does_not_read(server: RunningServer, n: int) -> None:
    server.engine.script_end = None
    client = connect(server, stop="450 w", n=n)
    wait_until(lambda: len(server.engine.text_ends) == n)
    chunks = chunks_of(read_reply(client))
    for index in range(n):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT[: TEXT.index("450 w")]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "450 w")
    client.close()


def test_the_usage_so_far_is_that_of_what_is_shown(server: RunningServer) -> None:
    """Not of what was read ahead for a client that does not read."""
    num_tokens = len(TEXT.encode())
    options = {"include_usage": True, "continuous_usage_stats": True}
    client = connect(server, n=2, return_token_ids=True, stream_options=options)
    wait_until(lambda: server.engine.num_said == 2 * num_tokens)
    *chunks, last = chunks_of(read_reply(client))
    counts = [0, 0]
    for chunk in chunks:
        [choice] = chunk["choices"]
        counts[choice["index"]] += len(choice.get("token_ids") or [])
        assert chunk["usage"]["completion_tokens"] == counts[choice["index"]]
    assert counts == [num_tokens, num_tokens]
    assert last["usage"]["completion_tokens"] == 2 * num_tokens
    client.close()


def test_an_error_comes_after_what_was_read_for_a_client_that_does_not_read(server: RunningServer) -> None:
    client = connect(server)
    wait_until(lambda: server.engine.num_said == len(TEXT.encode()))
    server.engine.script_end = None
    stalled = connect(server)
    wait_until(lambda: server.engine.num_said > 30_000)
    server.loop.call_soon_threadsafe(server.engine.fail, EngineUnavailableError("the engine has died"))
    *events, error = chunks_of(read_reply(stalled))
    assert "died" in error["error"]["message"]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text.startswith(TEXT)
    assert len(text) > 15_000
    for each in (client, stalled):
        each.close()


def test_a_failure_while_a_client_does_not_read_ends_its_stream_by_an_error(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = SequenceText.push
    failures: list[int] = []

    def fail_late(self: SequenceText, token_ids: list[int]) -> str:
        if self.num_tokens > 30_000:
            failures.append(self.num_tokens)
            raise ZeroDivisionError
        return push(self, token_ids)

    end = EventStream.end

    async def end_when_more_has_come(self: EventStream, data: bytes) -> None:
        num_said = server.engine.num_said
        await asyncio.to_thread(wait_until, lambda: server.engine.num_said > num_said + 1)
        await end(self, data)

    monkeypatch.setattr(SequenceText, "push", fail_late)
    monkeypatch.setattr(EventStream, "end", end_when_more_has_come)
    server.engine.script_end = None
    with capture_logs() as logs:
        stalled = connect(server)
        wait_until(lambda: failures)
        *_, error = chunks_of(read_reply(stalled))
        wait_until(lambda: any(line["event"] == "request" for line in list(logs)))
    assert error["error"]["type"] == "server_error"
    assert [line["event"] for line in logs] == ["a stream failed", "request"]
    assert (logs[-1]["outcome"], logs[-1]["error_status"]) == ("cut", 500)
    stalled.close()


def test_the_connection_serves_on_after_a_slow_stream(server: RunningServer) -> None:
    client = connect(server)
    assert len(chunks_of(read_reply(client, most_bytes=1000))) > 2
    body = b'{"model": "test", "prompt": "x", "max_tokens": 4}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\r\n\r\n" + body)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()


@pytest.mark.parametrize("is_endless", [True, False])
def test_a_client_that_reads_nothing_is_disconnected(impatient: RunningServer, is_endless: bool) -> None:
    if is_endless:
        impatient.engine.script_end = None
    else:
        # What is left fits into what may wait: the end of the stream waits for it nevertheless.
        impatient.engine.script = spell("x" * 20_000, width=2_000)
    started = time.monotonic()
    client = connect(impatient, max_tokens=900_000)
    other = impatient.chat(max_tokens=5).json()
    assert other["usage"]["completion_tokens"] == 5
    wait_until(lambda: impatient.context.num_running == 0)
    assert time.monotonic() - started > 1
    if is_endless:
        assert impatient.engine.cancelled == [(0, "client")]
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while received := client.recv(65536):
            data += received
    assert b"[DONE]" not in data
    client.close()


def test_a_client_that_reads_a_little_now_and_then_is_served(start_server: Callable[..., RunningServer]) -> None:
    patient = prepared(start_server(max_stream_buffer="4KiB", write_timeout_seconds=2))
    patient.engine.script = spell(TEXT * 3, width=3)
    client = connect(patient)
    data = b""
    started = time.monotonic()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        received = client.recv(24 * 1024)
        assert received
        data += received
        # Longer in all than a client may read nothing.
        time.sleep(max(0.0, min(0.15, 2.3 - (time.monotonic() - started))))
    assert time.monotonic() - started > 2
    client.close()


def test_what_waits_is_bounded(server: RunningServer) -> None:
    server.engine.script_end = None
    clients = [connect(server, logprobs=True, top_logprobs=5) for _ in range(8)]
    wait_until(lambda: len(server.engine.requests) == 8)
    num_said = server.engine.num_said
    wait_until(lambda: server.engine.num_said > num_said + 15_000)
    connections = server.call(_waiting(server))
    assert len(connections) == 8
    # The bound, and the chunk that went over it.
    assert max(connections) < 4096 + 64 * 3 * 1000
    for client in clients:
        client.close()
    wait_until(lambda: server.context.num_running == 0)


async def _waiting(server: RunningServer) -> list[int]:
    manager = server._server._runner.server
    assert manager is not None
    return [handler.transport.get_write_buffer_size() for handler in manager.connections if handler.transport]


async def test_comments_go_into_open_streams_of_events_alone() -> None:
    written: list[bytes] = []
    protocol = SimpleNamespace(writing_paused=False)
    transport = SimpleNamespace(is_closing=lambda: transport.is_closed, is_closed=False, write=written.append)
    writer: Any = SimpleNamespace(protocol=protocol, transport=transport, chunked=False, output_size=0)
    events, lines = (EventStream(Any, ServerConfig(), each) for each in (SERVER_SENT_EVENTS, JSON_LINES))  # type: ignore[arg-type]
    for stream in (events, lines):
        stream.comment("not begun")
        stream._writer = writer
        stream.comment("recovering")
    protocol.writing_paused = True
    events.comment("no room")
    protocol.writing_paused, transport.is_closed = False, True
    events.comment("the client has left")
    assert written == [b": recovering\n"]
