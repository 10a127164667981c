"""An engine's process under a keeper: when it ends by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.keeper.conftest import StartKept, start_kept
from tests.processes import PATIENCE_SECONDS, is_running, wait_until

__all__ = ["start_kept"]


@pytest.mark.parametrize("hangs", [False, True])
def test_it_ends_with_its_keeper(start_kept: StartKept, hangs: bool) -> None:
    server = start_kept()
    engine, worker = server.engine, server.worker
    if hangs:
        os.kill(engine, signal.SIGSTOP)
    server.process.kill()
    assert server.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    wait_until(lambda: not is_running(engine) and not is_running(worker))


def test_one_that_cannot_go_on_makes_room_for_the_next(start_kept: StartKept) -> None:
    server = start_kept("--max-restarts", "0")
    first, worker = server.engine, server.worker
    os.kill(worker, signal.SIGKILL)
    lost = server.wait_for("engine lost")
    assert (lost["pid"], lost["reason"]) == (first, "died (exit code 1)")
    assert server.wait_for("replica given up")["left"] == 0
    server.wait_for("ready", 2)
    assert server.complete().status == 200
    assert server.stop() == 0


def test_its_workers_hold_none_of_its_sockets_and_leave_no_files(start_kept: StartKept, tmp_path: Path) -> None:
    left = tmp_path / "temporary"
    left.mkdir()
    server = start_kept(environment={"TMPDIR": str(left)})
    engine, worker = server.engine, server.worker
    assert open_sockets(engine) & open_sockets(server.process.pid)
    assert not open_sockets(engine) & open_sockets(worker)
    [folder] = left.iterdir()
    server.kill_engine()
    server.wait_for("ready", 2)
    assert server.worker == worker
    assert [*left.iterdir()] == [folder]
    assert not open_sockets(server.engine) & open_sockets(worker)
    assert server.stop() == 0
    assert [*left.iterdir()] == []


def open_sockets(pid: int) -> set[str]:
    files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return {file for file in files if file.startswith("socket:")}
