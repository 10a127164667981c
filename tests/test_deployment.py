"""The Dockerfile, the systemd unit and .gitignore name files, flags and paths of this version."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventlm.cli.config_flags import config_from_arguments
from eventlm.cli.main import _parser
from eventlm.config import Config
from eventlm.server.middleware import HEALTH_PATH

REPOSITORY = Path(__file__).parent.parent
UNIT = REPOSITORY / "eventlm.service"


def config_of(arguments: Sequence[str]) -> Config:
    """The configuration that a command line of the program leads to."""
    parsed = _parser(arguments[0]).parse_args(arguments)
    assert hasattr(parsed, "run")
    return config_from_arguments(parsed)


def instructions(name: str) -> list[str]:
    """The arguments of each of the Dockerfile's instructions of one kind."""
    text = re.sub(r"\\\n\s*", "", (REPOSITORY / "Dockerfile").read_text())
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]


def unit() -> dict[str, str]:
    """The settings of the unit's service."""
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def test_the_container_runs_the_program_and_is_reachable() -> None:
    [entrypoint], [command] = instructions("ENTRYPOINT"), instructions("CMD")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert json.loads(entrypoint) == list(project["scripts"])
    config = config_of(json.loads(command))
    assert config.server.host == "0.0.0.0"
    assert [str(config.server.port)] == instructions("EXPOSE")
    [volume] = instructions("VOLUME")
    environment = " ".join(instructions("ENV"))
    assert config.record.record.startswith(volume)
    assert all(f"{name}={volume}/" in environment for name in ("EVENTLM_HOME", "HF_HOME", "XDG_STATE_HOME"))
    [check] = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{config.server.port}{HEALTH_PATH}'" in check
    assert instructions("USER") == ["eventlm"]


def test_the_health_check_is_a_program() -> None:
    [check] = instructions("HEALTHCHECK")
    python, option, code = json.loads(check.partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    # Nobody listens here, so it fails, as the container's does until the server is ready.
    code = re.sub(r":\d+/", ":1/", code)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode != 0


def test_what_is_copied_exists_and_reaches_the_build() -> None:
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    allowed = [
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((REPOSITORY / source).exists() for source in copied)


def test_the_list_of_requirements_is_that_of_the_package(tmp_path: Path) -> None:
    [line] = [line for line in instructions("RUN") if "tomllib" in line]
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    code = shlex.split(line.partition(" > ")[0])
    done = subprocess.run([sys.executable, *code[1:]], cwd=tmp_path, capture_output=True, text=True)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == project["dependencies"]
    assert any(requirement.startswith("torch") for requirement in project["dependencies"])


@pytest.mark.parametrize(
    ("index", "options"),
    [("", []), ("https://wheels.example/cpu", ["--extra-index-url", "https://wheels.example/cpu"])],
)
def test_the_torch_of_the_container_is_the_one_that_is_tested(index: str, options: list[str]) -> None:
    [line] = [line for line in instructions("RUN") if "TORCH_INDEX" in line]
    # What pip would be called with.
    shown = line.replace("pip install", "printf '%s\\n'")
    done = subprocess.run(["sh", "-c", shown], env={"TORCH_INDEX": index}, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["--constraint", "constraints.txt", *options, "--only-binary=:all:", "torch"]
    constraints = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert len([constraint for constraint in constraints if constraint.startswith("torch==")]) == 1


def test_no_index_of_packages_is_named_unless_the_builder_names_one() -> None:
    assert [argument for argument in instructions("ARG") if "INDEX" in argument] == ["TORCH_INDEX="]


def test_the_unit_serves_on_the_loopback_and_writes_to_its_own_folders_only() -> None:
    settings = unit()
    program, *arguments = settings["ExecStart"].split()
    assert program.endswith("/bin/eventlm")
    config = config_of(arguments)
    assert config.server.host == "127.0.0.1"
    assert int(settings["TimeoutStopSec"]) > config.server.drain_seconds + 5
    assert config.record.record.startswith(f"%S/{settings['StateDirectory']}/")
    indices = dict(setting.split("=", 1) for setting in settings["Environment"].split())
    own = (f"%C/{settings['CacheDirectory']}", f"%S/{settings['StateDirectory']}")
    assert set(indices) == {"EVENTLM_HOME", "HF_HOME", "XDG_STATE_HOME", "HOME"}
    assert all(index.startswith(own) for index in indices.values())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/eventlm/bin/eventlm", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a checkout")
def test_what_the_commands_of_the_readme_leave_in_a_checkout_is_ignored() -> None:
    left = ["results/summary.json", "plots/ttft.png", "runs/latest/trace.jsonl", "shortest.py", "azure.jsonl"]
    done = subprocess.run(["git", "check-ignore", *left], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.split() == left
