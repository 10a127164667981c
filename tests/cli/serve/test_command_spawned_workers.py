"""Workers are spawned before a server's model is looked at: how many, with what, and what becomes of them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from eventlm.config import ServerConfig
from eventlm.errors import ExitCode
from eventlm.system.processors import usable_cores
from eventlm.system.system import System
from tests.checkpoints import make_checkpoint
from tests.cli.conftest import RunHere, StartServer
from tests.cli.serve.test_file_limit import Limits
from tests.processes import wait_until

#: In torch's place: it tells that it is being imported, and never comes to an end.
ENDLESS = """
import os, time
from pathlib import Path
Path(__file__).with_name(f"{os.getpid()}.importing").touch()
time.sleep(3600)
"""


class Spawning(NamedTuple):
    """So many workers, while the process may open so many files."""

    count: int
    max_files: int


@pytest.fixture
def spawnings(monkeypatch: pytest.MonkeyPatch) -> list[Spawning]:
    """Filled in place of spawning any."""
    found: list[Spawning] = []

    @contextlib.asynccontextmanager
    async def note(system: System, count: int, *libraries: str) -> AsyncIterator[list[object]]:
        found.append(Spawning(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        yield []

    monkeypatch.setattr("eventlm.launchers.spawned_worker.spawned_ahead", note)
    Limits(monkeypatch, 1024, 1 << 20)
    return found


@pytest.mark.parametrize("replicas", [1, 64])
def test_as_many_as_cores_load_at_once(run_here: RunHere, spawnings: list[Spawning], replicas: int) -> None:
    code, _, errors = run_here("serve", "missing", "--port", "0", "--replicas", str(replicas))
    assert (code, "missing" in errors) == (ExitCode.USAGE, True)
    [spawning] = spawnings
    assert spawning.count == min(replicas, usable_cores())
    # They inherit a limit that was raised.
    assert spawning.max_files > ServerConfig().max_connections


def test_a_mistyped_policy_spawns_none(run_here: RunHere, spawnings: list[Spawning]) -> None:
    code, _, errors = run_here("serve", "missing", "--policy", "nosuch")
    assert (code, "nosuch" in errors) == (ExitCode.USAGE, True)
    assert spawnings == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_none_stays_for_its_libraries(start_server: StartServer, tmp_path: Path, number: int) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text(ENDLESS)
    path = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = start_server(str(make_checkpoint(tmp_path / "model")), wait=False, environment={"PYTHONPATH": path})
    wait_until(lambda: list(libraries.glob("*.importing")))
    # It waits for the worker.
    server.stop(number=number)
