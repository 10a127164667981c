"""The socket's life: clients that leave, large bodies, broken HTTP, drain, signals."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import threading
from typing import Any

import pytest

from eventlm.config import ServerConfig
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import UsageError
from eventlm.server.context import ServerContext
from eventlm.server.http_server import HttpServer, run_server
from eventlm.system.system import real_system
from eventlm.text.fake_tokenizer import FakeTokenizer
from tests.http_exchange import Reply
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves, capture_logs
from tests.server.engine_double import EngineDouble, spell


def chat_bytes(**fields: Any) -> bytes:
    body = json.dumps({"model": "test", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def endless(server: RunningServer) -> None:
    server.engine.max_model_len = 1_000_000
    server.engine.script_end = None
    server.engine.step_seconds = 0.005


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_cancelled_at_once(server: RunningServer, stream: bool) -> None:
    endless(server)
    connection = server.raw(chat_bytes(stream=stream, n=2))
    if stream:
        assert b"chat.completion.chunk" in connection.recv(65536)
    wait_until(lambda: bool(server.engine.requests))
    with capture_logs() as logs:
        connection.close()
        wait_until(lambda: server.engine.cancelled == [(0, "client")])
        wait_until(lambda: bool(logs))
    # How much of the prompt was cached is told at the end, for which nobody has waited.
    assert (logs[0]["status"], "cached_tokens" in logs[0]) == (499, False)
    server.engine.script_end = "eos"
    assert_serves(server)


def test_a_client_that_leaves_while_it_is_submitted(server: RunningServer) -> None:
    endless(server)
    server.engine.submit_seconds = 0.1
    connection = server.raw(chat_bytes())
    wait_until(lambda: server.engine.num_groups == 1)
    connection.close()
    wait_until(lambda: server.engine.cancelled == [(0, "client")])


def test_a_client_that_leaves_amid_its_body(server: RunningServer) -> None:
    connection = server.raw(chat_bytes()[:-5])
    connection.close()
    assert_serves(server)
    assert len(server.engine.requests) == 1


def test_a_client_that_reads_slowly_gets_everything(server: RunningServer) -> None:
    text = "x" * 200
    server.engine.script = spell(text)
    connection = server.raw(chat_bytes(stream=True, max_tokens=200))
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(512)
    connection.close()
    assert data.count(b'"content":"x"') == 200


def test_a_body_of_100_mb(server: RunningServer) -> None:
    announced = server.post("/v1/completions", b" " * 100_000_000)
    assert_error(announced, 413, INVALID, message="65536 bytes")
    assert_serves(server)


def test_a_large_body_without_a_length(server: RunningServer) -> None:
    connection = server.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    for _ in range(4):
        connection.sendall(chunk)
    assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")
    connection.close()
    assert_serves(server)


def test_permission_to_send_a_body(server: RunningServer) -> None:
    head, body = chat_bytes().split(b"\r\n\r\n")
    connection = server.raw(head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
    connection.close()
    head = head.replace(b"Content-Length: ", b"Content-Length: 9999")
    connection = server.raw(head + b"\r\nExpect: 100-continue\r\n\r\n")
    assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    connection.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_an_envelope_too(server: RunningServer, data: bytes) -> None:
    connection = server.raw(data)
    response = http.client.HTTPResponse(connection)
    response.begin()
    reply = Reply(response.status, dict(response.getheaders()), response.read())
    assert_error(reply, 400, INVALID, message="not valid HTTP")
    connection.close()
    assert_serves(server)


def test_the_log_has_no_content(server: RunningServer) -> None:
    with capture_logs() as logs:
        server.chat(messages=[{"role": "user", "content": "canary"}], stop="canary", user="canary")
        server.post("/v1/completions", b'{"model": "canary", "prompt": "canary"}', {"Authorization": "Bearer canary"})
        wait_until(lambda: len(logs) == 2)
    assert [(line["event"], line["status"]) for line in logs] == [("request", 200), ("request", 404)]
    assert all(line["request_id"] and line["duration_ms"] >= 0 for line in logs)
    assert "canary" not in repr(logs)


def test_polls_of_the_health_are_logged_for_debugging(server: RunningServer) -> None:
    with capture_logs() as logs:
        server.request("GET", "/health")
        server.request("GET", "/version")
        wait_until(lambda: len(logs) == 2)
    assert [(line["path"], line["log_level"]) for line in logs] == [("/health", "debug"), ("/version", "info")]


def test_a_busy_port(server: RunningServer) -> None:
    async def start() -> None:
        config = ServerConfig(port=server.port)
        await HttpServer(ServerContext(real_system(), server.engine, FakeTokenizer(), config)).start()

    with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{server.port}"):
        asyncio.run(start())


def in_background(work: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


def test_drain_lets_requests_end_and_refuses_new_ones(server: RunningServer) -> None:
    server.engine.most_said = 5
    thread, results = in_background(lambda: server.chat(stream=True))
    wait_until(lambda: server.engine.num_said == 5)
    draining = asyncio.run_coroutine_threadsafe(server._server.drain(asyncio.Event()), server.loop)
    wait_until(lambda: server.context.draining)
    refused = server.chat()
    assert_error(refused, 503, "server_error", message="shutting down")
    assert int(refused.headers["retry-after"]) >= 1
    assert server.request("GET", "/health").status == 503
    assert not draining.done()
    server.engine.most_said = math.inf
    draining.result(PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    events = results[0].events()
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert not server.engine.cancelled


def test_drain_waits_until_a_reply_has_left(server: RunningServer) -> None:
    server.engine.max_model_len = 2_000_000
    server.engine.script = lambda request, index: [[120] * 500_000]
    body = json.dumps({"model": "test", "prompt": "hi", "max_tokens": 500_000}).encode()
    # So that most of the reply waits in the server until it is read.
    server._server._listener._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect((server.host, server.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = connection.recv(100)
    assert received.startswith(b"HTTP/1.1 200")
    draining = asyncio.run_coroutine_threadsafe(server._server.drain(asyncio.Event()), server.loop)
    wait_until(lambda: server.context.draining)
    assert server.request("GET", "/health").status == 503
    assert not draining.done()
    while not received.endswith(b"}"):
        received += connection.recv(65536)
    draining.result(PATIENCE_SECONDS)
    assert received.count(b"x") > 500_000
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_drain_ends_what_takes_too_long(start_server: Any, stream: bool) -> None:
    server = start_server(drain_seconds=0)
    endless(server)
    thread, results = in_background(lambda: server.chat(stream=stream))
    # By then the first of it has been sent.
    wait_until(lambda: server.engine.num_said > 20)
    with capture_logs() as logs:
        server.call(server._server.drain(asyncio.Event()))
        thread.join(PATIENCE_SECONDS)
        wait_until(lambda: bool(logs))
    assert server.engine.cancelled[0] == (0, "shutdown")
    [line] = logs
    if stream:
        *_, error, done = results[0].events()
        assert (error["error"]["type"], done) == ("server_error", "[DONE]")
        assert (line["status"], line["outcome"]) == (200, "cut")
        assert (line["error"], line["error_status"]) == ("server_error", 503)
    else:
        assert_error(results[0], 503, "server_error")
        assert line["status"] == 503


def test_a_body_still_being_sent_when_a_drain_ends_gets_an_error(start_server: Any) -> None:
    server = start_server(drain_seconds=0)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    with server.raw(head.encode() + b"{") as connection:
        wait_until(lambda: server.context.num_running == 1)
        server.call(server._server.drain(asyncio.Event()))
        assert server.context.num_running == 0
        data = connection.recv(65536)
    assert data.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: " in data
    assert b"shutting down" in data


def test_a_stream_that_ends_well_and_one_whose_client_leaves_are_not_logged_as_cut(server: RunningServer) -> None:
    with capture_logs() as logs:
        server.chat(stream=True)
        endless(server)
        connection = server.raw(chat_bytes(stream=True))
        assert b"chat.completion.chunk" in connection.recv(65536)
        connection.close()
        wait_until(lambda: len(logs) == 2)
    assert [(line["status"], "outcome" in line) for line in logs] == [(200, False), (499, False)]


@pytest.mark.parametrize("in_haste", [False, True])
async def test_stopping(in_haste: bool) -> None:
    engine = EngineDouble(spell("Hello"))
    engine.step_seconds = 0.02
    engine.script_end = None if in_haste else "eos"
    context = ServerContext(real_system(), engine, FakeTokenizer(), ServerConfig(port=0))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    draining: list[int] = []
    stop, cut = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        run_server(context, stop=stop, cut=cut, on_ready=ready.set_result, on_draining=draining.append)
    )
    address = ("127.0.0.1", int((await ready).rpartition(":")[2]))
    reader, writer = await asyncio.open_connection(*address)
    writer.write(chat_bytes())
    await engine.submitted.wait()
    stop.set()
    if in_haste:
        await asyncio.sleep(0.01)
        cut.set()
    reply = await reader.read(65536)
    assert reply.startswith(b"HTTP/1.1 503 " if in_haste else b"HTTP/1.1 200 OK")
    await asyncio.wait_for(serving, PATIENCE_SECONDS)
    assert draining == [1]
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=PATIENCE_SECONDS)
    writer.close()


async def test_it_listens_while_it_loads() -> None:
    engine = EngineDouble(spell("Hello"))
    engine.state = "loading"
    context = ServerContext(real_system(), engine, FakeTokenizer(), ServerConfig(port=0))
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    may_load, ready, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def load() -> None:
        await may_load.wait()
        engine.state = "ready"

    serving = asyncio.create_task(
        run_server(
            context,
            stop=stop,
            cut=asyncio.Event(),
            load=load,
            on_listening=listening.set_result,
            on_ready=lambda _: ready.set(),
        )
    )
    address = ("127.0.0.1", int((await listening).rpartition(":")[2]))

    async def health() -> bytes:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        reply = await reader.read()
        writer.close()
        return reply

    assert (await health()).startswith(b"HTTP/1.1 503 ")
    may_load.set()
    await ready.wait()
    assert (await health()).startswith(b"HTTP/1.1 200 ")
    stop.set()
    await asyncio.wait_for(serving, PATIENCE_SECONDS)


@pytest.mark.parametrize("fails", [False, True])
async def test_loading_that_fails_or_is_given_up(fails: bool) -> None:
    engine = EngineDouble(spell("Hello"))
    engine.state = "loading"
    stop = asyncio.Event()
    ended: list[str] = []

    async def load() -> None:
        if fails:
            raise EngineUnavailableError("no worker")
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("load")

    context = ServerContext(real_system(), engine, FakeTokenizer(), ServerConfig(port=0))
    serving = run_server(
        context, stop=stop, cut=asyncio.Event(), load=load, on_ready=lambda _: ended.append("never ready")
    )
    if fails:
        with pytest.raises(EngineUnavailableError, match="no worker"):
            await serving
    else:
        await asyncio.wait_for(serving, PATIENCE_SECONDS)
        assert ended == ["load"]
