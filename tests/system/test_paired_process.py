"""A child at the other end of a socket pair: what it inherits, and that the end of one is the end of the other."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from eventlm.system.paired_process import spawn_paired
from eventlm.system.system import real_system
from tests.processes import is_running, until

#: Answers with its arguments, and ends with the connection.
PROGRAM = """
import os, socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
end.sendall(" ".join(sys.argv[2:]).encode() + os.read(int(sys.argv[2]), 10))
assert end.recv(1) == b""
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "paired_child.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "paired_child"


async def test_it_inherits_its_end_and_what_it_is_given(module: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"-hi")
        number = str(theirs.fileno())
        process, end = await spawn_paired(real_system(), module, number, "two", pass_fds=[theirs.fileno()])
    with end:
        assert await asyncio.to_thread(end.recv, 100) == f"{number} two-hi".encode()
        assert is_running(process.pid)
    assert await process.wait() == 0


async def test_its_death_closes_our_end(module: str) -> None:
    process, end = await spawn_paired(real_system(), module, "no number")
    with end:
        await process.wait()
        assert await asyncio.to_thread(end.recv, 100) == b""
    await until(lambda: not is_running(process.pid))
