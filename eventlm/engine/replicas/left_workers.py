"""Workers whose engine has died or handed over: the next one takes over those that it would start in the same way, so
that weights are not loaded again, and ends the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

import eventlm
from eventlm.errors import CheckpointError
from eventlm.launchers.launcher import StartedRank
from eventlm.launchers.spawned_worker import kill_and_close, kill_process
from eventlm.models.config import model_fingerprint
from eventlm.system.left_process import LeftProcess
from eventlm.system.parent_pipe import PipeError
from eventlm.system.source_hash import source_hash
from eventlm.system.system import System
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup, encode

log = structlog.get_logger("eventlm.replica")


class LeftWorker(Struct, frozen=True, array_like=True):
    """What an engine says of a worker. setup: a digest of its setup, apart from the epoch. fingerprint: of the model
    that it has loaded. code: a hash of the code that it runs.
    """

    replica: int
    epoch: int
    setup: bytes
    fingerprint: str
    code: str


_decode = msgspec.msgpack.Decoder(LeftWorker).decode


def describe(setup: WorkerSetup, fingerprint: str) -> bytes:
    """A worker with this setup and model, for the next engine."""
    return encode(LeftWorker(setup.replica, setup.epoch, _digest(setup), fingerprint, _code()))


def _digest(setup: WorkerSetup) -> bytes:
    return blake2b(encode(setup.lasting), digest_size=16).digest()


def _code() -> str:
    return source_hash(Path(eventlm.__file__).parent, ("",))


class LeftWorkers:
    """The workers that an engine finds when it starts."""

    def __init__(self, system: System, processes: Iterable[LeftProcess] = ()) -> None:
        self._system = system
        self._left: dict[int, tuple[LeftWorker, StartedRank]] = {}
        for process in processes:
            # One that has died meanwhile is none.
            with contextlib.suppress(OSError):
                self._adopt(process)

    def _adopt(self, process: LeftProcess) -> None:
        adopted = self._system.processes.adopt(process.pid)
        try:
            about = _decode(process.about)
            pipe = self._system.pipes.reopen(process.addresses)
        except (msgspec.DecodeError, PipeError) as error:
            log.warning("a worker cannot be taken over", pid=process.pid, reason=str(error))
            kill_process(adopted)
            return
        self._left[about.replica] = (
            about,
            StartedRank(pipe, adopted, epoch=about.epoch, fingerprint=about.fingerprint),
        )

    async def take(self, setup: WorkerSetup) -> StartedRank | None:
        """The worker of a replica if this one would be started in the same way; another one of the replica is ended."""
        left, rank = self._left.pop(setup.replica, (None, None))
        if left is None or rank is None:
            return None
        with contextlib.suppress(CheckpointError):
            fingerprint = FAKE_MODEL if setup.model == FAKE_MODEL else model_fingerprint(setup.model)
            if (left.setup, left.fingerprint, left.code) == (_digest(setup), fingerprint, _code()):
                return rank
        await kill_and_close([rank])
        return None

    async def end(self) -> None:
        """End those that were not taken."""
        ranks = [rank for _, rank in self._left.values()]
        self._left.clear()
        await kill_and_close(ranks)
