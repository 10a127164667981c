"""Front-end processes of a keeper, as the engine sees them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eventlm.engine.request import EngineUnavailableError
from eventlm.frontend.kept_processes import KeptProcesses
from eventlm.keeper.protocol import EndFrontEnd, FrontEndEnded, FrontEndRuns
from eventlm.system.passed_sockets import PassedSockets
from eventlm.system.system import real_system
from tests.processes import until


class Keeper:
    """What a keeper would get."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.sent: list[EndFrontEnd] = []
        self.passed: list[tuple[int, socket.socket]] = []
        self._ends = [
            PassedSockets(ours, lambda *_: None),
            PassedSockets(theirs, lambda number, end: self.passed.append((number, end))),
        ]
        self.processes = KeptProcesses(real_system(), self._ends[0], self.sent.append, [1, 2], ("127.0.0.1", 80))

    async def start(self, number: int, answer: FrontEndRuns) -> Any:
        """Have a front end started, with this answer."""
        starting = asyncio.create_task(self.processes.start(number))
        await until(lambda: self.passed)
        self.processes.take(answer)
        return await starting

    def close(self) -> None:
        for end in (*self._ends, *(end for _, end in self.passed)):
            end.close()


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


async def test_a_process_is_connected_and_its_end_is_told(keeper: Keeper) -> None:
    process = await keeper.start(2, FrontEndRuns(2, 77))
    [(number, far)] = keeper.passed
    assert (number, process.pid, process.ending, process.left_in_order) == (2, 77, "", False)
    process.end.sendall(b"hello")
    assert far.recv(16) == b"hello"
    # Of the one before.
    keeper.processes.take(FrontEndEnded(2, 76, 0))
    killing = asyncio.create_task(process.kill())
    await until(lambda: keeper.sent == [EndFrontEnd(2)])
    assert not killing.done()
    keeper.processes.take(FrontEndEnded(2, 77, -9))
    await killing
    await process.kill()
    assert (process.ending, process.left_in_order, len(keeper.sent)) == ("died (killed by SIGKILL)", False, 1)
    process.end.close()


async def test_one_that_cannot_be_started_is_an_error(keeper: Keeper) -> None:
    with pytest.raises(EngineUnavailableError, match="cannot start a front end: it was given up"):
        await keeper.start(1, FrontEndRuns(1, error="it was given up"))


async def test_those_that_are_let_go_live_on(keeper: Keeper) -> None:
    process = await keeper.start(1, FrontEndRuns(1, 77))
    keeper.processes.let_go()
    await process.kill()
    keeper.processes.close(1)
    assert keeper.sent == []
    process.end.close()


async def test_one_that_is_given_up_gets_no_further_connections(keeper: Keeper) -> None:
    keeper.processes.close(2)
    assert keeper.sent == [EndFrontEnd(2, for_good=True)]
