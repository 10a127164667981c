"""What `eventlm serve` tells a person or a program when it is ready and when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from eventlm.cli.serve import _announce_end
from eventlm.config import Config

from .conftest import StartServer


@pytest.mark.parametrize(
    ("num_requests", "text"),
    [
        (0, "shutting down: no request is running\n"),
        (1, "shutting down: waiting up to 30 s for 1 request; a second Ctrl-C ends it at once\n"),
        (1200, "shutting down: waiting up to 30 s for 1,200 requests; a second Ctrl-C ends them at once\n"),
    ],
)
def test_a_person_is_told_what_the_end_waits_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, num_requests: int, text: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _announce_end(num_requests, Config())
    assert capsys.readouterr().err == text


def curl_arguments(hint: str, **environment: str) -> list[str]:
    """What a shell would call curl with."""
    script = f"curl() {{ printf '%s\\0' \"$@\"; }}\n{hint}"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_the_ready_line_has_the_specs_and_a_command_that_works(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--policy", "edf:multiplier=2,min_deadline_ms=300", "--router", "pull")
    ready = server.log_event("ready")
    assert (ready["policy"], ready["router"]) == ("edf:multiplier=2,min_deadline_ms=300", "pull")
    url, *headers, flag, body = curl_arguments(ready["hint"])
    assert (url, flag) == (f"{server.url}/v1/chat/completions", "-d")
    assert headers == ["-H", "content-type: application/json"]
    assert json.loads(body)["temperature"] == 0
    reply = server.request("POST", "/v1/chat/completions", body.encode(), {"Content-Type": "application/json"})
    assert reply.events()[-1] == "[DONE]"


def test_the_command_sends_the_key_that_the_shell_has(start_server: StartServer) -> None:
    server = start_server("--model", "fake", environment={"EVENTLM_API_KEY": "the-key"})
    hint = server.log_event("ready")["hint"]
    assert "the-key" not in hint
    assert "Authorization: Bearer the-key" in curl_arguments(hint, EVENTLM_API_KEY="the-key")
