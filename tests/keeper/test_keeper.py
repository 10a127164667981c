"""An engine that dies is followed by another one, on the same sockets; what ends the keeper, and with what status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.keeper.conftest import StartKept
from tests.keeper.kept_server import KeptServer
from tests.processes import PATIENCE_SECONDS, is_running
from tests.serving import fake_text

#: A step of the fake model takes 20 ms.
SLOW = ("--fake", "base_ns=20000000")


def ask(server: KeptServer, **fields: object) -> socket.socket:
    """A connection over which a completion was asked for."""
    body = json.dumps({"model": "fake", "prompt": "hi", "max_tokens": 8, **fields})
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def read_all(client: socket.socket) -> str:
    with client:
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


def test_a_client_that_waits_while_the_engine_dies_is_served_by_the_next(start_kept: StartKept) -> None:
    server = start_kept()
    first, worker = server.engine, server.worker
    # So that it accepts no connection.
    server.kill_engine(signal.SIGSTOP)
    client = ask(server, seed=5)
    os.kill(first, signal.SIGKILL)
    reply = read_all(client)
    assert json.dumps(fake_text(5, 8)) in reply
    assert server.worker == worker
    lost = server.wait_for("engine lost")
    assert (lost["pid"], lost["reason"], lost["deaths"]) == (first, "died (killed by SIGKILL)", 1)
    assert server.wait_for("engine is back")["pid"] == server.engine != first
    assert server.stop() == 0


def test_a_worker_that_was_taken_over_is_watched(start_kept: StartKept) -> None:
    server = start_kept()
    worker = server.worker
    for number in (2, 3):
        server.kill_engine()
        server.wait_for("ready", number)
        assert server.worker == worker
    os.kill(worker, signal.SIGKILL)
    assert server.wait_for("worker is back")["replica"] == 0
    assert server.complete(seed=3).json()["choices"][0]["text"] == fake_text(3, 8)
    server.kill_engine()
    server.wait_for("ready", 4)
    assert server.complete(seed=4).json()["choices"][0]["text"] == fake_text(4, 8)
    assert server.stop() == 0


def test_five_deaths_in_ten_minutes_are_too_many(start_kept: StartKept) -> None:
    server = start_kept()
    for number in range(1, 6):
        engine = server.wait_spawned()
        os.kill(engine, signal.SIGKILL)
        server.wait_for("engine lost", number)
    assert server.process.wait(PATIENCE_SECONDS) == 1
    line = (
        "eventlm: error: the engine was lost 5 times in 10 minutes, the last time because it died (killed by "
        "SIGKILL); see the log above"
    )
    assert server.stderr.splitlines()[-1] == line
    assert len(server.log_events("engine lost")) == 5


def test_an_engine_that_hangs_is_killed(start_kept: StartKept) -> None:
    server = start_kept("--heartbeat-timeout-seconds", "1")
    server.kill_engine(signal.SIGSTOP)
    assert server.wait_for("engine lost")["reason"] == "sent no heartbeat for 1 s"
    server.wait_for("ready", 2)
    assert server.complete(seed=3).json()["choices"][0]["text"] == fake_text(3, 8)


def test_a_keeper_that_was_suspended_kills_nobody(start_kept: StartKept) -> None:
    server = start_kept("--heartbeat-timeout-seconds", "1")
    for process in (server.process.pid, server.engine):
        os.kill(process, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(1.5)
    for process in (server.process.pid, server.engine):
        os.kill(process, signal.SIGCONT)
    assert server.complete().status == 200
    assert server.log_events("engine lost") == []


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--no-record"], 2, "--recover needs a trace"),
        (["--model", "/no/such/folder"], 2, "/no/such/folder"),
        (["--host", "203.0.113.1"], 2, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_a_start_that_fails_has_one_line_and_its_status(
    start_kept: StartKept, flags: list[str], status: int, message: str
) -> None:
    server = start_kept(*flags, wait=False)
    assert server.process.wait(PATIENCE_SECONDS) == status
    [line] = server.stderr.splitlines()
    assert line.startswith("eventlm: error: ")
    assert message in line


def test_an_engine_that_is_killed_while_it_starts_ends_the_server(start_kept: StartKept) -> None:
    server = start_kept(wait=False)
    engine = server.wait_spawned()
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(PATIENCE_SECONDS) == 1
    assert "eventlm: error: the engine died (killed by SIGKILL) while it started\n" in server.stderr


def test_a_signal_while_it_starts_ends_the_server(start_kept: StartKept) -> None:
    server = start_kept(wait=False)
    engine = server.wait_spawned()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_SECONDS) == 0
    assert not is_running(engine)


def test_a_drain_lets_requests_end_and_a_second_signal_ends_them(start_kept: StartKept) -> None:
    server = start_kept(*SLOW, "--drain-seconds", "600")
    client = ask(server, stream=True, max_tokens=8000)
    assert b"HTTP/1.1 200" in client.recv(100)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for("shutting down")["num_requests"] == 1
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert "data: " in read_all(client)
    assert server.process.wait(PATIENCE_SECONDS) == 0


def test_an_engine_that_dies_in_a_drain_is_a_failure(start_kept: StartKept) -> None:
    server = start_kept(*SLOW, "--drain-seconds", "600")
    with ask(server, stream=True, max_tokens=8000) as client:
        assert b"HTTP/1.1 200" in client.recv(100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("shutting down")
        server.kill_engine()
        assert server.process.wait(PATIENCE_SECONDS) == 1
    assert "eventlm: error: the engine died (killed by SIGKILL) while it was shutting down\n" in server.stderr


def test_keys_are_read_again(start_kept: StartKept, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text("[[keys]]\nname = 'a'\nkey = 'first'\n")
    server = start_kept("--api-keys-file", "keys.toml")
    file.write_text("[[keys]]\nname = 'a'\nkey = 'second'\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for("API keys reloaded")
    statuses = [
        server.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status
        for key in ("first", "second")
    ]
    assert statuses == [401, 200]


def test_one_that_was_made_ready_ahead_takes_over(start_kept: StartKept) -> None:
    server = start_kept("--log-level", "debug", standby_seconds=0)
    ahead = server.wait_for("an engine is ready to take over")["pid"]
    server.kill_engine()
    assert server.wait_for("engine is back")["pid"] == ahead
    assert server.complete(seed=7).json()["choices"][0]["text"] == fake_text(7, 8)
    assert server.stop() == 0
    assert server.log_events("no engine is made ready ahead") == []


def test_a_keeper_loads_little() -> None:
    code = (
        "import sys\nimport eventlm.cli.serve.command, eventlm.keeper.keeper, eventlm.cli.logging_setup\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'tokenizers', 'zmq', 'eventlm.core', 'eventlm.server'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.stdout == "[]\n", done.stderr
