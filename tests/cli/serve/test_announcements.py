"""What `eventlm serve` tells a person or a program when it is ready and when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventlm.bootstrap.cache_plan import FAKE_NUM_BLOCKS
from eventlm.cli.serve.announcements import _hint, _machinery, announce_end
from eventlm.config import Config, ServerConfig
from eventlm.worker.protocol import TORCH_BACKEND
from tests.checkpoints import make_checkpoint
from tests.cli.conftest import StartServer
from tests.processes import wait_until


@pytest.mark.parametrize(
    ("num_requests", "text"),
    [
        (0, "shutting down: no request is running\n"),
        (1, "shutting down: waiting up to 30 s for 1 request; a second Ctrl-C ends it at once\n"),
        (1200, "shutting down: waiting up to 30 s for 1,200 requests; a second Ctrl-C ends them at once\n"),
    ],
)
def test_a_terminal_shows_what_the_shutdown_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, num_requests: int, text: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    announce_end(num_requests, Config())
    assert capsys.readouterr().err == text


def curl_arguments(hint: str, **environment: str) -> list[str]:
    """What a shell would call curl with."""
    script = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{hint}"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_its_lines_have_the_ranks_and_the_names_of_all_models(start_server: StartServer) -> None:
    other = "other:model=fake,served_model_name=second"
    server = start_server("--model", "fake", "--tensor-parallel-size", "2", "--replicaset", other)
    ready = server.log_event("ready")
    assert (ready["model"], ready["models"], ready["ranks"], ready["replicas"]) == ("fake", ["fake", "second"], 2, 2)
    assert server.log_event("loading")["models"] == ["fake", "second"]
    os.kill(server.worker_pids[1], signal.SIGKILL)
    wait_until(lambda: "worker lost" in server.stderr)
    lost = server.log_event("worker lost")
    assert (lost["replica"], lost["model"]) in [(0, "fake"), (1, "second")]


def test_the_ready_line_has_the_specs_and_a_command_that_works(start_server: StartServer) -> None:
    flags = ["--policy", "edf:multiplier=2,min_deadline_ms=300", "--router", "pull"]
    # The command asks for as much as there is room for.
    server = start_server("--model", "fake", "--max-model-len", "128", *flags)
    ready = server.log_event("ready")
    assert (ready["policy"], ready["router"]) == ("edf:multiplier=2,min_deadline_ms=300", "pull")
    # Nothing computes the fake model.
    assert (ready["num_blocks"], ready["device"]) == (FAKE_NUM_BLOCKS, "none")
    assert {"gpu", "attention_backend", "threads", "models", "ranks"}.isdisjoint(ready)
    url, *headers, flag, body = curl_arguments(ready["hint"])
    assert (url, flag) == (f"{server.url}/v1/chat/completions", "-d")
    assert headers == ["-H", "content-type: application/json"]
    assert json.loads(body)["temperature"] == 0
    reply = server.request("POST", "/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
    assert reply.events()[-1] == "[DONE]"


def test_the_ready_line_has_what_computes_the_model(start_server: StartServer, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    flags = ["--device", "cpu", "--cpu-kernels", "torch", "--threads", "1", "--num-blocks", "40"]
    server = start_server(str(folder), *flags)
    ready = server.log_event("ready")
    found = [ready[name] for name in ("device", "attention_backend", "threads", "num_blocks")]
    assert found == ["cpu", TORCH_BACKEND, 1, 40]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ({"device": "none"}, ""),
        (
            {"device": "cpu", "attention_backend": "cpu_avx512", "threads": 4},
            " on the processor with 4 threads each, backend cpu_avx512",
        ),
        (
            {"device": "cuda:0", "gpu": "NVIDIA A10", "attention_backend": "triton"},
            " on NVIDIA A10 with attention backend triton",
        ),
    ],
)
def test_a_terminal_shows_what_computes_the_model(host: dict[str, Any], said: str) -> None:
    assert _machinery(host) == said


def test_in_a_log_of_text_the_command_stands_by_itself(start_server: StartServer) -> None:
    flags = ["--model", "fake", "--log-format", "text", "--served-model-name", "it's $HOME"]
    server = start_server(*flags, wait=False)
    wait_until(lambda: '"stream":true}' in server.stderr)
    log, _, hint = server.stderr.partition("try it:\n")
    assert " ready " in log
    assert "curl" not in log
    url, *_, flag, body = curl_arguments(hint)
    assert url in f"{log.partition('url=')[2].split()[0]}/v1/chat/completions"
    assert (flag, json.loads(body)["model"]) == ("-d", "it's $HOME")


def test_the_command_says_where_a_key_of_a_file_comes_from() -> None:
    hint = _hint("http://x", "m", ServerConfig(api_keys_file="keys.toml"))
    assert "EVENTLM_API_KEY" not in hint
    assert hint.startswith("# first put one of the keys of --api-keys-file into K\ncurl ")
    assert "Authorization: Bearer a-key" in curl_arguments(hint, K="a-key")


def test_the_command_says_to_find_a_key_that_the_shell_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENTLM_API_KEY", raising=False)
    hint = _hint("http://x", "m", ServerConfig(api_key="the-key"))
    assert hint.startswith("# first put the server's API key into K\n")
    assert "the-key" not in hint
    assert "Authorization: Bearer a-key" in curl_arguments(hint, K="a-key")


def test_the_command_sends_the_key_that_the_shell_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_API_KEY", "the-key")
    hint = _hint("http://x", "m", ServerConfig(api_key="the-key"))
    assert "the-key" not in hint
    assert "Authorization: Bearer the-key" in curl_arguments(hint, EVENTLM_API_KEY="the-key")
