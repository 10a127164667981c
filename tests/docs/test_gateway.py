"""The page about the gateway: what it tells a reader to run does what it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventlm.config.load import load_config
from eventlm.config.model_rules import check_model_rules
from eventlm.config.replicasets import configs_of_replicasets
from tests.docs.pages import REPOSITORY
from tests.processes import PATIENCE_SECONDS
from tests.test_deployment import config_of

PAGE = (REPOSITORY / "docs" / "gateway.md").read_text()


def block(heading: str, language: str = "") -> str:
    """The first block of a language below a heading."""
    section = PAGE.partition(f"# {heading}\n")[2]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.S | re.M)
    assert found is not None, heading
    return found[1]


@pytest.fixture
def free_ports() -> dict[str, str]:
    """Ports that nobody has, in place of those of the page."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [str(each.getsockname()[1]) for each in sockets]
    return dict(zip(("8000", "8001", "8002"), ports, strict=True))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_lost_backend_costs_no_request(tmp_path: Path, free_ports: dict[str, str]) -> None:
    script = block("Lose a backend")
    commands = re.sub(r"\b800[012]\b", lambda port: free_ports[port[0]], script)
    assert commands.count("eventlm serve") == 3
    # The gateway's own port is the default one.
    commands = commands.replace("--record runs", f"--port {free_ports['8000']} --record runs")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "EVENTLM_STATE": str(tmp_path / "state"),
    }
    process = subprocess.Popen(
        ["bash", "-e", "-c", commands],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    assert "100 sent, 100 succeeded" in output
    assert re.search(r"[\d,]+ events, [\d,]+ decisions verified", output)
    assert len(re.findall(r"^127\.0\.0\.1:\d+ +\d+ ", output, re.M)) == 2
    [down] = re.findall(r'"t":"backend_down".*"reason":"([^"]*)"', output)
    assert "failures in a row" in down
    assert "the slowest 3 of 100 sequences" in output


def test_the_unit_takes_the_command_of_the_page() -> None:
    """A drop-in empties ExecStart before it sets it."""
    lines = re.sub(r"\\\n\s*", "", block("Run it for others", "ini")).splitlines()
    assert lines[:2] == ["[Service]", "ExecStart="]
    _, *arguments = lines[2].removeprefix("ExecStart=").split()
    config = config_of(arguments)
    assert len(config.gateway.backend) == 2
    assert config.server.host == "127.0.0.1"


def test_the_models_of_the_page_are_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "eventlm.toml"
    file.write_text(block("Several models", "toml"))
    config = load_config(file, {})
    sets = configs_of_replicasets(config)
    check_model_rules(config.models, ["large", "next", "smollm2"], [])
    assert sets["large"].gateway.backend == ["dns:large.internal:8000"]
    assert sets["small"].gateway.backend == []
    assert config.models["large"].canary_percent == 5
