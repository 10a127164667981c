"""A restart: an engine with what is on the disk takes over, or the present one goes on and somebody is told why."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.keeper.conftest import StartKept
from tests.keeper.kept_server import KeptServer
from tests.processes import is_running, wait_until
from tests.serving import fake_text

CONFIG = "eventlm.toml"
FLAGS = ("--config", CONFIG)
ADMIN = {"Authorization": "Bearer admin-key"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The server's configuration, with a key of an operator."""
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("[[keys]]\nname = 'ops'\nkey = 'admin-key'\nscopes = ['admin', 'inference']\n")
    path = tmp_path / CONFIG
    path.write_text(SERVER)
    return path


SERVER = "[server]\napi_keys_file = 'keys.toml'\n"


def models(server: KeptServer) -> list[str]:
    return [model["id"] for model in server.request("GET", "/v1/models", headers=ADMIN).json()["data"]]


def test_a_signal_brings_the_configuration_that_is_on_the_disk(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS, "--max-queue-len", "7")
    first = server.engine
    config.write_text(f"{SERVER}[model]\nserved_model_name = 'second'\n")
    server.process.send_signal(signal.SIGUSR2)
    server.wait_for("handed over")
    server.wait_for("ready", 2)
    assert models(server) == ["second"]
    assert server.engine != first
    assert server.log_events("engine lost") == []
    # The next one after a death has the same.
    config.write_text("broken")
    server.kill_engine()
    server.wait_for("ready", 3)
    assert models(server) == ["second"]
    assert server.stop() == 0


def test_a_worker_that_is_of_no_use_to_the_next_engine_ends(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS)
    worker = server.worker
    config.write_text(f"{SERVER}[scheduler]\nmax_num_seqs = 3\n")
    server.process.send_signal(signal.SIGUSR2)
    server.wait_for("ready", 2)
    assert server.worker != worker
    assert not is_running(worker)
    assert server.stop() == 0


def test_an_operator_gets_an_answer_before_the_engine_hands_over(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS)
    first = server.engine
    reply = server.request("POST", "/admin/restart", headers=ADMIN)
    assert (reply.status, reply.json()["state"]) == (200, "ready")
    body = b'{"prompt": "hi", "max_tokens": 8, "seed": 3}'
    headers = {**ADMIN, "Content-Type": "application/json"}
    wait_until(lambda: server.log_events("handed over"))
    completion = server.request("POST", "/v1/completions", body, headers)
    assert completion.json()["choices"][0]["text"] == fake_text(3, 8)
    assert server.engine != first
    assert server.stop() == 0


def test_what_cannot_take_over_is_said_and_the_engine_goes_on(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS)
    first = server.engine
    for text, message in (
        (f"{SERVER}[model]\nmodel = 1", "eventlm.toml, [model]: model = 1: must be"),
        (f"{SERVER}[scheduler]\npolicy = {{ type = 'none' }}", "unknown policy 'none'"),
        ("[server]\napi_keys_file = 'none.toml'", "none.toml"),
        (f"{SERVER}host = '127.0.0.2'\n", "--host cannot be changed by a restart; stop the server and start it."),
    ):
        config.write_text(text)
        reply = server.request("POST", "/admin/restart", headers=ADMIN)
        assert (reply.status, reply.json()["error"]["code"]) == (409, "not_restarted")
        assert message in reply.json()["error"]["message"]
        assert server.engine == first
        assert server.is_healthy()
    config.write_text("broken")
    server.process.send_signal(signal.SIGUSR2)
    assert "eventlm.toml, line 1" in server.wait_for("not restarted", 5)["error"]
    assert server.engines == [first]
    assert server.stop() == 0


def test_one_that_cannot_start_gives_way_to_the_configuration_before(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS)
    # Only one engine at a time can use the file, so it is not opened before.
    config.write_text(f"{SERVER}response_store = 'no-folder/responses'\n[model]\nserved_model_name = 'second'\n")
    server.process.send_signal(signal.SIGUSR2)
    assert "no-folder/responses" in server.wait_for("engine lost")["reason"]
    server.wait_for("ready", 2)
    assert models(server) == ["fake"]
    assert server.stop() == 0


def test_restarts_go_one_by_one_and_end_with_the_server(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS)
    first = server.engine
    server.process.send_signal(signal.SIGUSR2)
    following = wait_until(lambda: [pid for pid in server.engines if pid != first])
    server.process.send_signal(signal.SIGUSR2)
    assert server.wait_for("not restarted")["error"] == "another restart is under way"
    assert server.stop() == 0
    assert not any(map(is_running, following))


def test_what_is_made_ready_ahead_is_of_the_code_before(start_kept: StartKept, config: Path) -> None:
    server = start_kept(*FLAGS, standby_seconds=0)
    first = server.engine
    [ahead] = wait_until(lambda: [pid for pid in server.engines if pid != first])
    server.process.send_signal(signal.SIGUSR2)
    server.wait_for("ready", 2)
    assert not is_running(ahead)
    assert server.engine not in (first, ahead)
    assert server.stop() == 0
