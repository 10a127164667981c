"""Front ends of a keeper: one process, and a socket for each engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eventlm.keeper.front_ends import KeptFrontEnds
from eventlm.keeper.protocol import EndFrontEnd, FrontEndEnded, FrontEndRuns
from eventlm.system.system import real_system
from tests.layout import ROOT
from tests.processes import is_running, until


class Engine:
    """What an engine is told, and its end of each connection."""

    def __init__(self, front_ends: KeptFrontEnds) -> None:
        self._front_ends = front_ends
        self.told: list[Any] = []
        self.ends: list[socket.socket] = []

    async def connect(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        self.ends.append(ours)
        await self._front_ends.connect(number, theirs, self.told.append)

    async def said(self) -> bytes:
        """What the front end says over the newest connection."""
        self.ends[-1].setblocking(False)
        return await asyncio.get_running_loop().sock_recv(self.ends[-1], 64)


@pytest.fixture
async def front_ends(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeptFrontEnds]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sockets = [[socket.create_server(("127.0.0.1", 0))] for _ in range(2)]
    kept = KeptFrontEnds(real_system(), "tests.keeper.stub_kept_front_end", sockets, asyncio.Lock())
    yield kept
    pids = kept.pids
    await kept.close()
    assert not any(map(is_running, pids))
    assert all(bound.fileno() == -1 for group in sockets for bound in group)


async def test_a_process_outlives_its_engines(front_ends: KeptFrontEnds) -> None:
    first, second = Engine(front_ends), Engine(front_ends)
    await first.connect(1)
    [pid] = front_ends.pids
    assert first.told == [FrontEndRuns(1, pid)]
    assert await first.said() == b"connection 1"
    await second.connect(1)
    assert second.told == [FrontEndRuns(1, pid)]
    assert await second.said() == b"connection 2"
    os.kill(pid, signal.SIGKILL)
    await until(lambda: len(second.told) == 2)
    assert second.told[1] == FrontEndEnded(1, pid, -signal.SIGKILL)
    assert len(first.told) == 1
    assert await second.said() == b""


async def test_a_dead_one_is_started_anew(front_ends: KeptFrontEnds) -> None:
    engine = Engine(front_ends)
    await engine.connect(2)
    [pid] = front_ends.pids
    front_ends.end(EndFrontEnd(2))
    await until(lambda: engine.told[1:] == [FrontEndEnded(2, pid, -signal.SIGKILL)])
    await engine.connect(2)
    assert front_ends.pids not in ({pid}, set())
    assert await engine.said() == b"connection 1"


async def test_one_that_is_given_up_is_not(front_ends: KeptFrontEnds) -> None:
    engine = Engine(front_ends)
    front_ends.end(EndFrontEnd(1, for_good=True))
    assert front_ends.numbers == [2]
    await engine.connect(1)
    assert engine.told == [FrontEndRuns(1, error="it was given up")]
    assert await engine.said() == b""


async def test_without_descriptors_there_is_an_error(
    front_ends: KeptFrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("eventlm.keeper.front_ends.spawn_paired", fail)
    engine = Engine(front_ends)
    await engine.connect(1)
    assert engine.told == [FrontEndRuns(1, error=f"[Errno 24] {os.strerror(24)}")]
