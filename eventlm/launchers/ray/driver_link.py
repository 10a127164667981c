"""The engine's end of the connection to its driver process of Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from eventlm.launchers.launcher import LaunchError
from eventlm.launchers.ray.messages import (
    Connect,
    Connected,
    FromDriver,
    GiveUpRoom,
    HostFacts,
    KillRank,
    Placed,
    PlaceReplica,
    RankEnded,
    Refused,
    Said,
    Started,
    StartRank,
    ToDriver,
    decode_from_driver,
    encode,
)
from eventlm.launchers.ray.placement import NodeRoom
from eventlm.launchers.ray.remote_process import RemoteProcess
from eventlm.system.frames import FrameConnection
from eventlm.system.paired_process import spawn_paired
from eventlm.system.processes import Process
from eventlm.system.system import System

MODULE = "eventlm.launchers.ray.driver"
#: What ended the ranks of a driver that is gone.
DRIVER_DIED = "the driver of Ray died"

START_ADVICE = "start one with `ray start --head`, or give its address as ray:address=HOST:PORT"


def in_words(address: str) -> str:
    """The cluster at an address, and for `auto` where Ray looks for it."""
    if address == "auto":
        return "a Ray cluster (address=auto: that of RAY_ADDRESS, else one that runs on this host)"
    return f"the Ray cluster at {address}"


class DriverLink:
    """A driver process that has joined a cluster. Of a driver that has died, all processes have."""

    def __init__(self, process: Process) -> None:
        #: Of the node that the engine runs on.
        self.address = ""
        #: Of the cluster when it was joined.
        self.nodes: list[NodeRoom] = []
        self.is_lost = False
        self._process = process
        self._connection: FrameConnection | None = None
        self._connecting: asyncio.Future[Connected] = asyncio.get_running_loop().create_future()
        self._placing: dict[int, asyncio.Future[list[HostFacts]]] = {}
        self._runs: dict[tuple[int, int, int], RemoteProcess] = {}
        self._num_runs = 0

    @classmethod
    async def open(cls, system: System, address: str, timeout_s: float) -> DriverLink:
        """Start a driver, which joins the cluster at `address`. Raises LaunchError, or OSError as a spawn does."""
        process, end = await spawn_paired(system, MODULE)
        link = cls(process)
        try:
            link._connection = await FrameConnection.open(end, link._take, link._lose)
            link._send(Connect(address=address))
            connected = await asyncio.wait_for(link._connecting, timeout_s)
            link.address, link.nodes = connected.address, connected.nodes
        except TimeoutError:
            await link.close()
            raise LaunchError(
                f"cannot join {in_words(address)}: it has not answered in {timeout_s:g} s; {START_ADVICE}"
            ) from None
        except LaunchError as error:
            await link.close()
            advice = f"; {START_ADVICE}" if error.waits_for_room else ""
            raise LaunchError(f"cannot join {in_words(address)}: {error}{advice}") from None
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def pid(self) -> int:
        """Process id of the driver."""
        return self._process.pid

    async def place(self, wanted: PlaceReplica) -> list[HostFacts]:
        """Find room for a replica; where its ranks are. Raises LaunchError."""
        if self.is_lost:
            raise LaunchError(DRIVER_DIED)
        replica = wanted.replica
        placing: asyncio.Future[list[HostFacts]] = asyncio.get_running_loop().create_future()
        self._placing[replica] = placing
        self._send(wanted)
        try:
            return await placing
        finally:
            del self._placing[replica]

    def run(
        self,
        replica: int,
        rank: int,
        module: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        defaults: dict[str, str],
    ) -> RemoteProcess:
        """Start the process of a rank of a placed replica. One that cannot be started ends at once."""
        self._num_runs += 1
        key = (replica, rank, self._num_runs)

        def kill() -> None:
            self._send(KillRank(replica=replica, rank=rank, run=key[2]))

        process = self._runs[key] = RemoteProcess(kill)
        self._send(
            StartRank(
                replica=replica,
                rank=rank,
                run=key[2],
                module=module,
                arguments=list(arguments),
                environment=environment,
                defaults=defaults,
            )
        )
        if self.is_lost:
            self._lose()
        return process

    def leave(self, replica: int) -> None:
        """Give up the room of a replica."""
        self._send(GiveUpRoom(replica=replica))

    async def close(self) -> None:
        """End the driver, and with it all that it has started."""
        self.is_lost = True
        if self._connection is not None:
            self._connection.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._lose()

    def _send(self, message: ToDriver) -> None:
        if self._connection is not None:
            self._connection.send(encode(message))

    def _take(self, frame: bytes) -> None:
        message: FromDriver = decode_from_driver(frame)
        match message:
            case Connected():
                self._connecting.set_result(message)
            case Placed():
                self._answer_place(message.replica, message.hosts)
            case Refused():
                error = LaunchError(message.message, waits_for_room=message.no_room)
                if message.replica < 0:
                    self._connecting.set_exception(error)
                else:
                    self._answer_place(message.replica, error)
            case Started() | Said() | RankEnded():
                self._note(message)

    def _note(self, message: Started | Said | RankEnded) -> None:
        key = (message.replica, message.rank, message.run)
        process = self._runs[key]
        match message:
            case Started():
                process.note_start(message.pid)
            case Said():
                process.note_output(message.output)
                if not message.output:
                    del self._runs[key]
            case RankEnded():
                process.note_end(message.exit_code, message.reason)

    def _answer_place(self, replica: int, answer: list[HostFacts] | LaunchError) -> None:
        future = self._placing.get(replica)
        if future is None or future.done():
            return
        if isinstance(answer, LaunchError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _lose(self) -> None:
        """The driver has died."""
        self.is_lost = True
        error = LaunchError(DRIVER_DIED)
        waiting: list[asyncio.Future[Any]] = [self._connecting, *self._placing.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if not self._connecting.cancelled():
            # Nobody may have waited for it.
            self._connecting.exception()
        for process in self._runs.values():
            process.note_end(1, DRIVER_DIED, of_all=True)
            process.note_output(b"")
        self._runs.clear()
