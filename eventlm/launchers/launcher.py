"""What a launcher is: it starts the worker processes of a replica, here or on other hosts, and says how they meet.

The engine talks to each of them through a pipe of messages, whatever started it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from eventlm.errors import EventLMError
from eventlm.system.pipes import ParentPipe
from eventlm.system.system import System
from eventlm.worker.protocol import WorkerSetup

if TYPE_CHECKING:
    import asyncio


class LaunchError(EventLMError):
    """The ranks of a replica could not be started. waits_for_room: there may be room for them later."""

    def __init__(self, message: str, *, waits_for_room: bool = False) -> None:
        super().__init__(message)
        self.waits_for_room = waits_for_room


class RankProcess(Protocol):
    """A worker process, as far as the engine needs it. A child process is one."""

    #: On its own host.
    pid: int

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What it prints; None if somebody else logs that."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status; -N if signal N ended it; None while it runs. 1 for one that is known to be lost, with its
        host for instance.
        """
        ...

    async def wait(self) -> int:
        """The exit status once it has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, or have it sent at once. Raises ProcessLookupError if it has ended."""
        ...


@runtime_checkable
class ReportedProcess(RankProcess, Protocol):
    """A process whose state others report.

    reason: how it was lost, where its exit status is not known; else empty. is_end_of_all: that ended all ranks, and
    none of them is to blame.
    """

    reason: str
    is_end_of_all: bool


class StartedRank(NamedTuple):
    """A process that waits for its setup. host: where it runs; empty: on this host, whose clock it has. epoch: the one
    that it had with an engine before; 0: it has had none. fingerprint: of the model that it has loaded by then.
    """

    pipe: ParentPipe
    process: RankProcess
    host: str = ""
    epoch: int = 0
    fingerprint: str = ""


class StartedRanks(Protocol):
    """The processes of one replica. All of them are started, none has its setup."""

    @property
    def ranks(self) -> Sequence[StartedRank]:
        """In the order of their numbers."""
        ...

    @property
    def setups(self) -> Sequence[WorkerSetup]:
        """What they are to be sent: what the launcher was given, with `peers`, and with the device, threads and
        processors of the place where each is.
        """
        ...

    def step_in_hand(self, rank: int) -> int:
        """The step that a rank has in hand, or had when it died; -1: none, or not known."""
        ...

    def release(self) -> None:
        """All of them have ended: give back what they had. Harmless when called twice."""
        ...


class Launcher(Struct, frozen=True, kw_only=True):
    """Starts the ranks of replicas. Its fields are its parameters.

    is_local: its processes are children of this one, so that some can be spawned before it is known what they are for.
    plans_memory: setups for processors come with `memory`, and with `num_blocks` 0 unless that was given. It checks
    that they fit where they will be, and decides how many blocks all replicas have.
    """

    version: ClassVar[str] = "1"
    is_local: ClassVar[bool] = False
    plans_memory: ClassVar[bool] = False

    async def start(
        self, system: System, setups: Sequence[WorkerSetup], spawned: Sequence[StartedRank] = ()
    ) -> StartedRanks:
        """Start a process for each rank of a replica. The first of them are there already if they are `spawned`.

        If it raises or is cancelled, only those are left. Raises LaunchError, or OSError or
        PipeError as a spawn does.
        """
        raise NotImplementedError

    def share(self, others: Sequence[Launcher]) -> None:
        """Other replicasets of the same engine have these. Have in common with them what an engine needs once. It is
        called before the first start.
        """

    def give_up(self, replica: int) -> None:
        """A replica has ended for good, and all of its ranks have: give back the room that is kept for it."""

    async def close(self) -> None:
        """The engine has stopped, and all ranks with it: give back what the launcher itself has. Harmless when called
        twice.
        """
