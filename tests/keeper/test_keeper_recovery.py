"""A stream that is resumed at the next engine has the text that it would have had, whatever ended the one before."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from eventlm.events import Recovered
from tests.keeper.conftest import StartKept
from tests.keeper.kept_server import KeptServer
from tests.processes import PATIENCE_SECONDS
from tests.serving import fake_text, verified

NUM_TOKENS = 60


class ResumingClient:
    """A stream over as many connections as it takes."""

    def __init__(self, server: KeptServer, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._reply_id = self._event_id = ""
        self.text = ""
        self.is_over = False

    def read(self, most_events: int) -> None:
        """Read over one connection to the end of the stream, or until so many events have come."""
        host, port = self._server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(self._request())
            lines = self._lines(connection, most_events)
        assert b" 200 " in lines[0], lines

    def _request(self) -> bytes:
        if self._event_id:
            head = f"GET /v1/stream/{self._reply_id} HTTP/1.0\r\nLast-Event-ID: {self._event_id}\r\n\r\n"
            return head.encode()
        fields = {"prompt": "hi", "seed": self._seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _lines(self, connection: socket.socket, most_events: int) -> list[bytes]:
        """The lines of the reply, whose events are taken as they come."""
        lines, num_events, event_id = [], 0, ""
        with connection.makefile("rb") as file:
            for line in file:
                lines.append(line)
                name, _, value = line.decode().strip().partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data":
                    self._take(event_id, value)
                    num_events += 1
                    if num_events == most_events:
                        break
        return lines

    def _take(self, event_id: str, data: str) -> None:
        self._event_id = event_id
        if data == "[DONE]":
            self.is_over = True
            return
        chunk = json.loads(data)
        assert "error" not in chunk, chunk
        self._reply_id = chunk["id"]
        self.text += "".join(choice["text"] for choice in chunk["choices"])


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "died (killed by SIGKILL)"), (signal.SIGUSR2, "restart")]
)
def test_a_stream_goes_on_at_the_next_engine(start_kept: StartKept, number: signal.Signals, reason: str) -> None:
    server = start_kept("--resume-seconds", "60", "--fake", "base_ns=20000000")
    client = ResumingClient(server, seed=5)
    client.read(20)
    assert not client.is_over
    worker = server.worker
    if number == signal.SIGKILL:
        server.kill_engine()
    else:
        server.process.send_signal(number)
    server.wait_for("ready", 2)
    assert server.worker == worker
    client.read(1000)
    assert client.is_over
    assert client.text == fake_text(5, NUM_TOKENS)
    assert server.stop() == 0
    trace = verified(server.trace)
    assert [event.reason for event in trace.of(Recovered)] == [reason]


def test_the_time_without_an_engine_is_not_that_without_requests(start_kept: StartKept) -> None:
    server = start_kept()
    assert server.complete(seed=3).status == 200
    idle_seconds = 2
    time.sleep(idle_seconds)
    server.kill_engine()
    killed_ns = time.monotonic_ns()
    server.wait_for("ready", 2)
    down_ns = time.monotonic_ns() - killed_ns
    assert server.stop() == 0
    [recovered] = verified(server.trace).of(Recovered)
    assert 0 < recovered.down_ns <= down_ns + 100_000_000
    assert recovered.ts > recovered.down_ns + idle_seconds * 1_000_000_000
