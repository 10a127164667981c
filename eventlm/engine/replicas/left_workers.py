"""Workers whose engine has died, or has handed over: the next one takes over those that it would start in the same way,
so that weights are not loaded again, and ends the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from hashlib import blake2b

import msgspec
from msgspec import Struct

from eventlm.launchers.launcher import StartedRank
from eventlm.launchers.spawned_worker import kill_and_close
from eventlm.system.left_process import LeftProcess
from eventlm.system.parent_pipe import PipeError
from eventlm.system.system import System
from eventlm.worker.protocol import WorkerSetup, encode


class LeftWorker(Struct, frozen=True, array_like=True):
    """What an engine says of a worker. setup: a digest of its setup, apart from the epoch."""

    replica: int
    epoch: int
    setup: bytes


_decode = msgspec.msgpack.Decoder(LeftWorker).decode


def describe(setup: WorkerSetup) -> bytes:
    """A worker with this setup, for the next engine."""
    return encode(LeftWorker(setup.replica, setup.epoch, _digest(setup)))


def _digest(setup: WorkerSetup) -> bytes:
    return blake2b(encode(setup.lasting), digest_size=16).digest()


class LeftWorkers:
    """Those that an engine finds."""

    def __init__(self, system: System, processes: Iterable[LeftProcess] = ()) -> None:
        self._system = system
        self._left: dict[int, tuple[LeftWorker, StartedRank]] = {}
        for process in processes:
            about = _decode(process.about)
            # One that has died meanwhile is none.
            with contextlib.suppress(OSError, PipeError):
                adopted = system.processes.adopt(process.pid)
                rank = StartedRank(system.pipes.reopen(process.addresses), adopted, epoch=about.epoch)
                self._left[about.replica] = (about, rank)

    async def take(self, setup: WorkerSetup) -> StartedRank | None:
        """The worker of a replica if it was started with this setup; another one of the replica is ended."""
        left, rank = self._left.pop(setup.replica, (None, None))
        if left is None or rank is None:
            return None
        if left.setup == _digest(setup):
            return rank
        await kill_and_close([rank])
        return None

    async def end(self) -> None:
        """End those that were not taken."""
        ranks = [rank for _, rank in self._left.values()]
        self._left.clear()
        await kill_and_close(ranks)
