"""Endpoints of operators: who may, what they answer, and what the log says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.engine.admin import Abort, Drain, FlushCache, Pause, ReadStatus, Restart, RestartError, Resume, SwapPolicy
from eventlm.engine.request import EngineUnavailableError
from tests.processes import wait_until
from tests.server.auth.test_api_keys import TWO_KEYS, bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs

OPS = bearer("sk-ops")
ACTIONS = [
    ("/admin/drain", Drain()),
    ("/admin/pause", Pause()),
    ("/admin/resume", Resume()),
    ("/admin/restart", Restart()),
    ("/admin/cache/flush", FlushCache()),
    ("/admin/requests/cmpl-1/abort", Abort(request="cmpl-1")),
]


@pytest.fixture
def guarded(start_server: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    return start_server(api_keys_file=str(write(tmp_path / "keys.toml", TWO_KEYS)))


def test_actions(guarded: RunningServer) -> None:
    for path, action in ACTIONS:
        with capture_logs() as logs:
            reply = guarded.request("POST", path, headers=OPS)
            # The request's own line comes behind the reply.
            wait_until(lambda logs=logs: any(line["event"] == "request" for line in logs))
        assert reply.status == 200
        assert reply.json()["policies"] == ["fcfs", "edf"]
        assert guarded.engine.actions.pop() == action
        line = next(line for line in logs if line["event"] == "admin")
        assert (line["key"], line["action"]) == ("ops", type(action).__struct_config__.tag)
        assert line.get("request") == getattr(action, "request", None)
    with capture_logs() as logs:
        assert guarded.request("GET", "/admin/status", headers=OPS).json()["state"] == "ready"
        wait_until(lambda: bool(logs))
    assert guarded.engine.actions.pop() == ReadStatus()
    assert [line["event"] for line in logs] == ["request"]


def test_operators_see_every_keys_requests(guarded: RunningServer) -> None:
    body = {"model": "test", "prompt": "x"}
    ids = [
        guarded.post("/v1/completions", body, {**bearer("sk-alice"), "x-request-id": name}).json()["id"]
        for name in ("jobs/7", "twice", "twice")
    ]
    for name in (ids[0], "jobs/7", "0"):
        found = guarded.request("GET", f"/admin/requests/{name}", headers=OPS)
        assert (found.status, found.json()["id"], found.json()["state"]) == (200, ids[0], "finished")
    twice = guarded.request("GET", "/admin/requests/twice", headers=OPS)
    assert_error(twice, 409, INVALID, "id", "ambiguous_request", f"{ids[1]}, {ids[2]}")
    unknown = guarded.request("GET", "/admin/requests/17", headers=OPS)
    assert_error(unknown, 404, INVALID, "id", "request_not_found")
    assert guarded.request("GET", f"/admin/requests/{ids[0]}", headers=bearer("sk-alice")).status == 403


def test_a_flush_says_how_much_it_was(guarded: RunningServer) -> None:
    flushed = guarded.request("POST", "/admin/cache/flush", headers=OPS).json()
    assert flushed["flushed"] == {"num_blocks": 7, "num_replicas": 2}
    assert "flushed" not in guarded.request("GET", "/admin/status", headers=OPS).json()


def test_swapping_the_policy(guarded: RunningServer) -> None:
    assert guarded.post("/admin/policy", {"policy": "edf"}, OPS).status == 200
    assert guarded.engine.actions == [SwapPolicy(name="edf")]
    refused = guarded.post("/admin/policy", {"policy": "lpm"}, OPS)
    assert_error(refused, 400, INVALID, "policy", "invalid_value", message="Unknown policy 'lpm'; installed at start: ")
    for body, param, code in [
        ({"policy": "lpm"}, "policy", "invalid_value"),
        ({"policy": 1}, "policy", "invalid_type"),
        ({}, "policy", "missing_required_parameter"),
        (b"{", None, None),
    ]:
        assert_error(guarded.post("/admin/policy", body, OPS), 400, INVALID, param, code)
    assert_error(guarded.request("POST", "/admin/policy", b"{}", OPS), 415, INVALID)


def test_what_is_not_there(guarded: RunningServer) -> None:
    for quoted, name in [("cmpl-2", "cmpl-2"), ("jobs/7", "jobs/7"), ("jobs%2F7", "jobs/7")]:
        refused = guarded.request("POST", f"/admin/requests/{quoted}/abort", headers=OPS)
        assert_error(refused, 404, INVALID, "id", "request_not_found", message=f"No request '{name}' is under way.")
    refused = guarded.request("POST", "/admin/requests/job-1/abort", headers=OPS)
    assert_error(refused, 409, INVALID, "id", "ambiguous_request", message="give a reply's own id: cmpl-1, cmpl-2.")
    assert_error(guarded.request("GET", "/admin/drain", headers=OPS), 405, INVALID, None, "method_not_supported")
    assert_error(guarded.request("GET", "/admin/nothing", headers=OPS), 404, INVALID, None, "unknown_url")
    assert guarded.request("GET", "/admin/nothing").status == 401


def test_an_engine_that_is_not_there(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def administer(action: object) -> None:
        raise EngineUnavailableError("the engine is not running")

    monkeypatch.setattr(guarded.engine, "administer", administer)
    refused = guarded.request("POST", "/admin/pause", headers=OPS)
    assert_error(refused, 503, "server_error", message="not running")
    assert refused.headers["retry-after"]


def test_a_restart_that_cannot_be_says_why(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def administer(action: object) -> None:
        raise RestartError("eventlm.toml: no")

    monkeypatch.setattr(guarded.engine, "administer", administer)
    refused = guarded.request("POST", "/admin/restart", headers=OPS)
    assert_error(refused, 409, INVALID, None, "not_restarted", message="Not restarted: eventlm.toml: no.")


def test_it_needs_the_scope(guarded: RunningServer) -> None:
    for path, _ in [*ACTIONS, ("/%61dmin/pause", None)]:
        for headers, status in [({}, 401), (bearer("sk-no"), 401), (bearer("sk-alice"), 403)]:
            assert guarded.request("POST", path, headers=headers).status == status
    refused = guarded.request("POST", "/admin/drain", headers=bearer("sk-alice"))
    assert_error(refused, 403, INVALID, None, "missing_scope", message="needs an API key with the scope 'admin'.")
    assert "--api-keys-file" not in refused.json()["error"]["message"]
    assert not guarded.engine.actions


@pytest.mark.parametrize("settings", [{}, {"api_key": "sk-env"}])
def test_without_an_admin_key_it_says_how_to_set_one_up(
    start_server: Callable[..., RunningServer], settings: dict[str, str]
) -> None:
    server = start_server(**settings)
    refused = server.request("GET", "/admin/status", headers=bearer("sk-env"))
    assert_error(refused, 403, INVALID, None, "missing_scope", message="--api-keys-file FILE")
    assert server.request("GET", "/admin/status").status == 401
    assert not server.engine.actions
