"""Bounds on connections: how many, and how long a client may take for each part of a request."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from eventlm.server.http.connection import REQUEST_ID_HEADER, Connection, request_id
from eventlm.system.chance import SystemChance
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.server.conftest import RunningServer, assert_serves, capture_logs

Start = Callable[..., RunningServer]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

CHANCE = SystemChance()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes."""
    data = b""
    while received := connection.recv(65536):
        data += received
    return data


def error_of(data: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"x-request-id: req-" in head
    assert b"Content-Type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


def test_one_connection_too_many(start_server: Start) -> None:
    server = start_server(max_connections=2)
    first, second = server.raw(b""), server.raw(b"")
    with capture_logs() as logs:
        for _ in range(5):
            status, error = error_of(read_all(server.raw(b"")))
            assert (status, error["type"], error["code"]) == (503, "server_error", None)
            assert "as many connections" in error["message"]
    # One line for all of them.
    assert [(line["event"], line["refused"]) for line in logs] == [("too many connections", 1)]
    first.close()
    wait_until(lambda: server.request("GET", "/health").status == 200)
    second.close()
    # There is room again once the server has seen that they are closed.
    wait_until(lambda: server._server.num_connections == 0)
    assert_serves(server)


def test_a_head_that_does_not_come(start_server: Start) -> None:
    server = start_server(header_timeout_seconds=1)
    silent, slow = server.raw(b""), server.raw(b"GET /health HT")
    again = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in again.recv(65536)
    again.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
    for connection in (silent, slow, again):
        status, error = error_of(read_all(connection))
        assert (status, error["type"]) == (408, "invalid_request_error")
        assert "within 1 s" in error["message"]
    assert_serves(server)


def test_idling_and_running_connections_are_not_taken_for_slow_heads(start_server: Start) -> None:
    server = start_server(header_timeout_seconds=1)
    server.engine.script_end = None
    server.engine.step_seconds = 0.02
    body = json.dumps({"model": "test", "prompt": "x", "stream": True, "max_tokens": 75}).encode()
    running = server.raw(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    idle = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in idle.recv(65536)
    data = b""
    # It streams for longer than a head may take.
    while b"[DONE]" not in data:
        data += running.recv(65536)
    idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in idle.recv(65536)


def test_a_body_is_not_taken_for_a_slow_head(start_server: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first bytes come before anybody has taken up the request, and the reply takes longer than a head may."""
    whole = Connection.data_received

    def in_two_packets(self: Connection, data: bytes) -> None:
        head, end, body = data.partition(b"\r\n\r\n")
        whole(self, head + end)
        whole(self, body)

    monkeypatch.setattr(Connection, "data_received", in_two_packets)
    server = start_server(header_timeout_seconds=1)
    server.engine.script_end = None
    server.engine.step_seconds = 0.02
    body = json.dumps({"model": "test", "prompt": "x", "max_tokens": 75}).encode()
    connection = server.raw(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert b" 200 " in connection.recv(65536)


def test_a_body_that_comes_after_the_reply_is_not_taken_for_a_slow_head(start_server: Start) -> None:
    server = start_server(header_timeout_seconds=1)
    connection = server.raw(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n12")
    assert b" 404 " in connection.recv(65536)
    connection.sendall(b"34")
    time.sleep(1.3)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in connection.recv(65536)


def test_a_large_body_that_is_thrown_away_is_not_taken_for_a_slow_head(start_server: Start) -> None:
    server = start_server(header_timeout_seconds=1)
    size = 1_000_000
    connection = server.raw(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"1" * size)
    assert b" 404 " in connection.recv(65536)
    connection.settimeout(1.3)
    with pytest.raises(TimeoutError):
        connection.recv(65536)
    connection.settimeout(PATIENCE_SECONDS)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in connection.recv(65536)


def test_requests_after_an_upgrade_that_is_declined(start_server: Start) -> None:
    server = start_server()
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    connection = server.raw(head + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + head + b"\r\n")
    data = b""
    while data.count(b" 200 ") < 2:
        received = connection.recv(65536)
        assert received, data
        data += received
    # The next comes in two packets.
    connection.sendall(head)
    wait_until(lambda: [each._head_timer is not None for each in connections_of(server)] == [True])
    connection.sendall(b"\r\n")
    assert b" 200 " in connection.recv(65536)


def connections_of(server: RunningServer) -> list[Connection]:
    manager = server._server._runner.server
    assert manager is not None
    return [each for each in manager.connections if isinstance(each, Connection)]


def test_a_connection_that_idles_is_closed(start_server: Start) -> None:
    server = start_server(idle_timeout_seconds=1)
    connection = server.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in connection.recv(65536)
    assert read_all(connection) == b""


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come(start_server: Start, framing: bytes) -> None:
    server = start_server(body_timeout_seconds=1)
    connection = server.raw(HEAD + framing + b"\r\n\r\n")
    connection.sendall(b'{"mod' if b"Length" in framing else b'5\r\n{"mod\r\n')
    data = connection.recv(65536)
    status, error = error_of(data)
    assert (status, error["type"], error["code"]) == (408, "invalid_request_error", None)
    assert "body did not come within 1 s" in error["message"]
    connection.close()
    assert_serves(server)


def test_no_version_is_revealed(server: RunningServer) -> None:
    for data in (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"nonsense\r\n\r\n"):
        head = read_all(server.raw(data)).partition(b"\r\n\r\n")[0]
        assert b"Server: eventlm\r\n" in head + b"\r\n"
        assert b"aiohttp" not in head


def test_bodies_have_a_bound_together(start_server: Start) -> None:
    server = start_server(max_body_bytes=64 * 1024, body_memory="100KiB")
    # Both have sent most of theirs, and wait with the rest.
    waiting = [server.raw(HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 45_000) for _ in range(2)]
    wait_until(lambda: server.context.num_body_bytes == 90_000)
    status, error = error_of(server.raw(HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 20_000).recv(65536))
    assert (status, error["type"]) == (503, "server_error")
    assert "as many bytes of requests" in error["message"]
    for connection in waiting:
        connection.close()
    wait_until(lambda: server.context.num_body_bytes == 0)
    assert_serves(server)
    assert server.context.num_body_bytes == 0


def test_a_reply_that_is_not_read(start_server: Start) -> None:
    server = start_server(write_timeout_seconds=1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((server.host, server.port))
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
    # It asks for far more than the kernel keeps for it.
    connection.settimeout(0.2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        for _ in range(2000):
            connection.sendall(request)
    wait_until(lambda: server._server.num_connections == 0)
    connection.close()
    assert_serves(server)


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_floods_of_headers(server: RunningServer, flood: bytes) -> None:
    status, error = error_of(read_all(server.raw(flood)))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert_serves(server)


@pytest.mark.parametrize("sent", ["req-1", "a.b_c:d/e+f=g@h-9", "x" * 128])
def test_a_sane_id_is_echoed(sent: str) -> None:
    assert request_id(CHANCE, make_mocked_request("GET", "/", headers={REQUEST_ID_HEADER: sent})) == sent


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "line\tbreak", "é"])
def test_any_other_is_replaced_by_a_fresh_one(sent: str) -> None:
    request = make_mocked_request("GET", "/", headers={REQUEST_ID_HEADER: sent})
    first, second = request_id(CHANCE, request), request_id(CHANCE, request)
    assert first.startswith("req-")
    assert len(first) == 36
    assert first != second
