"""A server that ends while its workers load their libraries takes them along."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.cli.conftest import StartServer
from tests.processes import wait_until

#: In torch's place: it tells that it is being imported, and never comes to an end.
ENDLESS = """
import os, time
from pathlib import Path
Path(__file__).with_name(f"{os.getpid()}.importing").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_stays_for_its_libraries(start_server: StartServer, tmp_path: Path, number: int) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "torch.py").write_text(ENDLESS)
    path = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = start_server(str(make_checkpoint(tmp_path / "model")), wait=False, environment={"PYTHONPATH": path})
    wait_until(lambda: list(libraries.glob("*.importing")))
    # It waits for the worker.
    server.stop(number=number)
