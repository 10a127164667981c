"""What monitors ask for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from eventlm._version import __version__
from tests.server.conftest import RunningServer


@pytest.mark.parametrize(
    "method_and_path", ["GET /health", "HEAD /health", "GET /v1/health", "GET /ping", "POST /ping"]
)
def test_ready_paused_and_draining(server: RunningServer, method_and_path: str) -> None:
    method, path = method_and_path.split()
    reply = server.request(method, path)
    assert (reply.status, method == "HEAD" or reply.json() == {"status": "ready"}) == (200, True)
    server.engine.has_worker = False
    assert server.request(method, path).status == 503
    server.engine.has_worker = True
    server.engine.paused = True
    assert method == "HEAD" or server.request(method, path).json() == {"status": "paused"}
    server.engine.state = "draining"
    assert server.request(method, path).status == 503


def test_while_the_next_engine_starts_requests_wait_and_monitors_are_told(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.state = "loading"
    assert server.request("GET", "/health").json()["error"]["code"] is None
    server.loop.call_soon_threadsafe(server.context.recovered.clear)
    reply = server.request("GET", "/health")
    assert (reply.status, reply.json()["error"]["code"]) == (503, "recovering")
    assert "retry-after" in reply.headers
    with ThreadPoolExecutor(1) as threads:
        completion = threads.submit(server.post, "/v1/completions", {"model": "test", "prompt": "x"})
        with pytest.raises(TimeoutError):
            completion.result(0.1)
        # It has the clock of a run that is a day old.
        now_ns = server.engine.now_ns()
        monkeypatch.setattr(server.engine, "now_ns", lambda: now_ns + 24 * 3600 * 10**9)
        server.engine.state = "ready"
        server.loop.call_soon_threadsafe(server.context.recovered.set)
        assert completion.result().status == 200
    total_ns = sum(duration_ns for _, duration_ns in server.context._http_requests.values())
    assert total_ns < 3600 * 10**9
    monkeypatch.setattr("eventlm.server.context.RECOVERY_SECONDS", 0.01)
    server.engine.state = "loading"
    server.loop.call_soon_threadsafe(server.context.recovered.clear)
    reply = server.post("/v1/completions", {"model": "test", "prompt": "x"})
    assert (reply.status, reply.json()["error"]["code"]) == (503, "recovering")


def test_of_a_server_of_backends_it_says_so(server: RunningServer) -> None:
    server.context.forwards = True
    server.engine.has_worker = False
    reply = server.request("GET", "/health")
    assert (reply.status, reply.json()["error"]["message"]) == (503, "No backend is up; requests wait for one.")


def test_replicas_that_wait_for_room_are_counted(server: RunningServer) -> None:
    server.engine.num_waiting_for_room = 2
    assert server.request("GET", "/health").json() == {"status": "ready", "waiting_for_room": 2}


def test_version(server: RunningServer) -> None:
    assert server.request("GET", "/version").json() == {"version": __version__, "server_id": server.engine.server_id}
