"""Several processes under MPI that put one load on a server.

Numbers of requests are dealt out in turn: as many as may be under way at once, or all of them where there is no limit.
Rank 0 hands out the others as ranks have places free. MPI's own waits keep a core busy, so all waiting here is polling
with sleeps, and a collective operation begins once every rank has arrived.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy

from eventlm.bench.launcher import PARTING_SECONDS, leave_to_mpi, num_launched
from eventlm.bench.ranks import NextNumber, Ranks
from eventlm.bench.records import LoadResult, RequestRecord
from eventlm.errors import EventLMError, UsageError

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

#: The event loop's timers have no finer steps.
_POLL_SECONDS = 0.001
_ASK, _ANSWER = 1, 2
_INSTALL = "pip install 'eventlm[mpi]'"


def world() -> MpiRanks:
    """All ranks of this run. Raises UsageError where MPI cannot be had or does not know of them."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError(f"--mpi needs the package mpi4py: {_INSTALL}") from error
    except RuntimeError as error:
        # What mpi4py says where it finds no library.
        raise UsageError(f"--mpi: mpi4py finds no MPI library: {_INSTALL}, or load that of this cluster") from error
    if MPI.COMM_WORLD.size == 1 < num_launched():
        library = MPI.Get_library_version().splitlines()[0].strip()
        raise UsageError(
            f"the launcher started {num_launched()} ranks, but to mpi4py each is alone: its library is {library}; "
            "take the mpiexec of that"
        )
    leave_to_mpi()
    return MpiRanks(MPI.COMM_WORLD)


class MpiRanks(Ranks):
    """The ranks of a communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        # Objects travel as those do that processes exchange elsewhere: pickle would run code that comes with them.
        MPI.pickle.__init__(msgspec.msgpack.encode, msgspec.msgpack.decode)  # type: ignore[misc]
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).rank
        self._has_failed = self._has_asked = False

    async def gathered(self, work: Awaitable[T], kind: type[T]) -> list[T]:
        own: EventLMError | None = None
        value: list[T] = []
        try:
            value = [await work]
        except EventLMError as error:
            own = error
        await self._all_arrived()
        # Not every error can be made again from what it was made of.
        failure = None if own is None else (str(own), int(own.exit_code))
        outcomes: list[tuple[list[Any], tuple[str, int] | None]] = self._comm.allgather((value, failure))
        for rank, (_, failed) in enumerate(outcomes):
            if failed is not None:
                self._has_failed = True
                if own is not None and rank == self.rank:
                    raise own
                message, exit_code = failed
                raise EventLMError(f"rank {rank}: {message}" if rank else message, exit_code=exit_code)
        return [msgspec.convert(value, kind) for values, _ in outcomes for value in values]

    async def sharing_errors(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except EventLMError as error:
            if not self._has_failed:
                await self.gathered(_raising(error), type(None))
            raise

    @asynccontextmanager
    async def numbers(
        self, *, total: int | None, max_concurrency: int, stop: asyncio.Event
    ) -> AsyncIterator[NextNumber | None]:
        end = sys.maxsize if total is None else total
        num_dealt = min(max_concurrency, end) if max_concurrency else end
        left = range(num_dealt, end)
        undealt = _Undealt(left, stop)
        more = self._ask if self.rank else undealt.take
        await self.gathered(_nothing(), type(None))
        # All are here: this takes no time, and they leave it together.
        self._comm.Barrier()
        handing_out = asyncio.create_task(self._hand_out(undealt)) if left and not self.rank else None
        yield _Numbers(range(self.rank, num_dealt, self.size), more if left else None)
        if self._has_asked:
            # A load that was stopped meanwhile: MPI does not end while a message lies unread.
            await self._answer()
        await self.gathered(_nothing(), type(None))
        if handing_out is not None:
            handing_out.cancel()

    async def _all_arrived(self) -> None:
        arrivals = self._comm.Ibarrier()
        while not arrivals.Test():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def _hand_out(self, undealt: _Undealt) -> None:
        """Answer the ranks that ask, on rank 0, until this is cancelled."""
        from mpi4py import MPI

        found = MPI.Status()
        while True:
            while self._comm.Iprobe(tag=_ASK, status=found):
                num_free = self._comm.recv(source=found.source, tag=_ASK)
                taken = await undealt.take(num_free)
                self._comm.send((taken.start, taken.stop), dest=found.source, tag=_ANSWER)
            await asyncio.sleep(_POLL_SECONDS)

    async def _ask(self, num_free: int) -> range:
        """Numbers from rank 0, as many as there are places free or fewer; none at the end."""
        self._comm.send(num_free, dest=0, tag=_ASK)
        self._has_asked = True
        return await self._answer()

    async def _answer(self) -> range:
        while not self._comm.Iprobe(source=0, tag=_ANSWER):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
        first, end = self._comm.recv(source=0, tag=_ANSWER)
        self._has_asked = False
        return range(first, end)

    def merged(self, load: LoadResult) -> LoadResult:
        from mpi4py import MPI

        packed = msgspec.msgpack.encode(load.records)
        sizes: list[int] = self._comm.gather(len(packed)) or []
        received = bytearray(sum(sizes))
        self._comm.Gatherv([packed, MPI.BYTE], [received, (sizes, None), MPI.BYTE] if self.rank == 0 else None)
        # The records say the same again: what is lost between here and there shows.
        counts = self._comm.allreduce(_count(load.records), op=_added)
        times_ns = numpy.array([load.duration_ns, load.cpu_ns], dtype=numpy.int64)
        self._comm.Allreduce(MPI.IN_PLACE, times_ns, op=MPI.MAX)
        load = LoadResult(
            _unpacked(received, sizes),
            duration_ns=int(times_ns[0]),
            cpu_ns=int(times_ns[1]),
            interrupted=self._comm.allreduce(load.interrupted, op=MPI.LOR),
            server_gone=next(filter(None, self._comm.allgather(load.server_gone)), ""),
        )
        if self.rank == 0 and _count(load.records) != counts:
            raise RuntimeError(f"the ranks have {counts}, of which {_count(load.records)} arrived")
        return load

    def leave(self) -> None:
        from mpi4py import MPI

        MPI.Finalize()
        if self.rank == 0 and self.size > 1:
            # Its end with an error would have the launcher kill those that are left.
            time.sleep(PARTING_SECONDS)

    def quit(self, exit_code: int) -> None:
        # What is printed is on its way first. MPI's own end would wait for others.
        time.sleep(PARTING_SECONDS)
        os._exit(exit_code)

    def abort(self) -> None:
        traceback.print_exc()
        self._comm.Abort(1)


class _Undealt:
    """The numbers that are to be handed out; none after `stop`, or once a rank has taken 0."""

    def __init__(self, numbers: range, stop: asyncio.Event) -> None:
        self._numbers = numbers
        self._stop = stop

    async def take(self, count: int) -> range:
        """The next `count` numbers, or those that are left."""
        if self._stop.is_set() or not count:
            self._numbers = range(0)
        taken, self._numbers = self._numbers[:count], self._numbers[count:]
        return taken


class _Numbers:
    """The numbers of one rank: those that were dealt to it, then those that it is given as it has places free."""

    def __init__(self, dealt: range, more: Callable[[int], Awaitable[range]] | None) -> None:
        self._ready = dealt
        self._more = more

    async def __call__(self, num_free: int | None) -> int | None:
        if num_free is None:
            self._ready = range(0)
        if not self._ready and self._more is not None:
            self._ready = await self._more(num_free or 0)
        if not self._ready:
            return None
        number, self._ready = self._ready[0], self._ready[1:]
        return number


def _count(records: list[RequestRecord]) -> Counter[str]:
    """The requests by their errors, with none for a success."""
    return Counter(record.error for record in records)


def _added(mine: Mapping[str, int], others: Mapping[str, int]) -> Counter[str]:
    return Counter(mine) + Counter(others)


def _unpacked(received: bytearray, sizes: list[int]) -> list[RequestRecord]:
    """The records of all ranks, in the order of their sends."""
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = (msgspec.msgpack.decode(received[first:end], type=list[RequestRecord]) for first, end in bounds)
    return sorted(chain.from_iterable(parts), key=lambda record: (record.sent_ns, record.index))


async def _nothing() -> None:
    pass


async def _raising(error: EventLMError) -> None:
    raise error
