"""Whoever starts the program may have closed its standard streams, as some supervisors do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import CLIENT_SETTINGS, Server, command

WITHOUT_STDIN_AND_STDOUT = ["bash", "-c", 'exec "$@" <&- >&-', "bash", sys.executable, "-m", "eventlm"]


@pytest.mark.parametrize("front_ends", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_server_without_them_serves(tmp_path: Path, front_ends: int) -> None:
    server = Server(tmp_path, "--model", "fake", "--api-servers", str(front_ends), program=WITHOUT_STDIN_AND_STDOUT)
    try:
        server.wait_ready()
        assert server.complete().status == 200
        server.stop_and_verify()
    finally:
        server.close()


@pytest.mark.parametrize(
    "closed",
    [
        ">&-",
        "2>&-",
        "<&- >&- 2>&-",
        pytest.param("<&-", marks=pytest.mark.soak),
        pytest.param("<&- 2>&-", marks=pytest.mark.soak),
    ],
)
def test_a_command_does_its_work_and_writes_to_what_is_open(tmp_path: Path, closed: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *command("generate", "--model", "fake", "--seed", "1", "hi")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CLIENT_SETTINGS["timeout"],
    )
    assert done.returncode == 0
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))
    assert done.stderr == ""
