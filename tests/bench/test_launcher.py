"""What launchers tell a process, and how it ends the others; `test_mpi_ranks` has a real one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from eventlm.bench import launcher
from eventlm.bench.launcher import end_launched, leave_to_mpi, num_launched

pytestmark = pytest.mark.usefixtures("_no_launcher")


@pytest.fixture
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_SIZE", "PMI_FD", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "PARTING_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("PMI_SIZE", "4", 4), ("OMPI_COMM_WORLD_SIZE", "2", 2), ("PMI_SIZE", "x", 1), ("SHELL", "sh", 1)],
)
def test_the_number_of_ranks(name: str, value: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert num_launched() == expected


def test_the_launcher_is_told_once_and_only_before_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there, (tmp_path / "file").open("wb", buffering=0) as file:
        there.setblocking(False)
        monkeypatch.setenv("PMI_FD", str(here.fileno()))
        end_launched(2)
        with pytest.raises(BlockingIOError):
            there.recv(99)
        monkeypatch.setenv("PMI_SIZE", "3")
        end_launched(2)
        assert there.recv(99) == b"cmd=abort exitcode=2\n"
        # Another file has its number in a child of a rank.
        monkeypatch.setenv("PMI_FD", str(file.fileno()))
        end_launched(2)
        assert file.tell() == 0
        monkeypatch.setenv("PMI_FD", str(here.fileno()))
        leave_to_mpi()
        end_launched(2)
        with pytest.raises(BlockingIOError):
            there.recv(99)
