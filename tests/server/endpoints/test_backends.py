"""`/admin/backends`: bodies become actions, errors have their places, and keys are shown nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.config.backends import BackendSpec
from eventlm.engine.backends.actions import AddBackend, DrainBackend, ListBackends, RemoveBackend, ResumeBackend
from tests.processes import wait_until
from tests.server.auth.test_api_keys import TWO_KEYS, bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs

OPS = bearer("sk-ops")
PATH = "/admin/backends"


@pytest.fixture
def guarded(start_server: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    return start_server(api_keys_file=str(write(tmp_path / "keys.toml", TWO_KEYS)))


def test_requests_are_actions(guarded: RunningServer) -> None:
    spec = "http://10.0.0.7:8000/v1,key=sk-secret,kind=vllm,weight=2"
    added = BackendSpec(url="http://10.0.0.7:8000", key="sk-secret", kind="vllm", weight=2.0)
    for method, path, body, action in (
        ("GET", "", None, ListBackends()),
        ("POST", "", {"backend": spec, "model": "small"}, AddBackend(spec=added, model="small")),
        ("DELETE", "/a:1?model=small", None, RemoveBackend(name="a:1", model="small")),
        ("POST", "/a:1/path/drain", None, DrainBackend(name="a:1/path")),
        ("POST", "/a:1%2Fpath/resume", None, ResumeBackend(name="a:1/path")),
    ):
        with capture_logs() as logs:
            reply = guarded.post(PATH, body, OPS) if body else guarded.request(method, f"{PATH}{path}", headers=OPS)
            wait_until(lambda logs=logs: any(line["event"] == "request" for line in logs))
        assert reply.status == 200
        assert reply.json() == {"backends": []}
        assert guarded.engine.actions.pop() == action
        assert "sk-secret" not in str(logs)
        admin = [(line["action"], line["backend"]) for line in logs if line["event"] == "admin"]
        assert admin == ([] if method == "GET" else [(action.__struct_config__.tag, action.name)])


def test_what_is_wrong_is_said_without_the_key(guarded: RunningServer) -> None:
    for backend, message in (
        ("10.0.0.7:8000", "must be a URL"),
        ("http://a:1,key=sk-secret,weight=-1", "weight=-1: must be a number above 0"),
        ("http://a:1,key_file=/etc/passwd", "key_file is for --backend"),
        ("http://a:1, key_env =HOME", "key_env is for --backend"),
        ("https://a:1,ca_file=/etc/passwd", "ca_file is for --backend"),
        ("dns:llm:8000,key=sk-secret", "dns: and file: are for --backend"),
        ("file:/etc/passwd", "dns: and file: are for --backend"),
    ):
        reply = guarded.post(PATH, {"backend": backend}, OPS)
        assert_error(reply, 400, INVALID, "backend", "invalid_value", message=message)
        assert "sk-secret" not in str(reply.json())
        assert reply.json()["error"]["message"].startswith((backend.split(",")[0], "key_", "ca_"))
    assert_error(guarded.post(PATH, {}, OPS), 400, INVALID, "backend", "missing_required_parameter")
    assert not guarded.engine.actions


def test_what_the_engine_refuses(guarded: RunningServer) -> None:
    refused = guarded.post(PATH, {"backend": "http://taken:1"}, OPS)
    assert_error(refused, 400, INVALID, "backend", "invalid_value", message="The backend taken:1 is there already.")
    refused = guarded.request("DELETE", f"{PATH}/nowhere:1", headers=OPS)
    assert_error(refused, 404, INVALID, "name", "backend_not_found", message="There is no backend 'nowhere:1'.")


def test_it_needs_the_scope(guarded: RunningServer) -> None:
    for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/a:1"), ("POST", "/a:1/drain")):
        for headers, status in [({}, 401), (bearer("sk-alice"), 403)]:
            assert guarded.request(method, f"{PATH}{path}", headers=headers).status == status
    assert not guarded.engine.actions
