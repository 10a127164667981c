"""The processes that put one load on a server together, and what they do as one. Without MPI there is one.

Each makes the same requests from the same options, so only their numbers travel. `eventlm.bench.mpi_ranks` has several.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from eventlm.bench.records import LoadResult

T = TypeVar("T")

#: Called with the number of free places, gives the number of the next request that this process sends; None: no more.
#: With None, because the server is gone, no process is given any more.
NextNumber = Callable[[int | None], Awaitable[int | None]]


class Ranks:
    """One process alone, which is rank 0 of 1. `local_rank` is its place among those on its host."""

    rank = 0
    size = 1
    local_rank = 0

    def share(self, number: int) -> int:
        """How many of `number` things this rank has, if they are dealt out one by one."""
        return len(range(self.rank, number, self.size))

    async def gathered(self, work: Awaitable[T], kind: type[T]) -> list[T]:
        """Await `work`, and all others' too: what came out of each rank's, of a type that msgspec knows.

        Raises EventLMError on all ranks if that of any raised it.
        """
        return [await work]

    async def first(self, work: Callable[[], Awaitable[T]], kind: type[T]) -> T:
        """What came out of `work` on rank 0, which alone does it."""

        async def on_first() -> list[T]:
            return [] if self.rank else [await work()]

        found: list[list[T]] = await self.gathered(on_first(), list[kind])  # type: ignore[valid-type]
        return found[0][0]

    async def sharing_errors(self, work: Awaitable[T]) -> T:
        """Await `work`; if it raises EventLMError on this rank alone, the others do too where they gather next."""
        return await work

    @asynccontextmanager
    async def numbers(
        self, *, total: int | None, max_concurrency: int, stop: asyncio.Event
    ) -> AsyncIterator[NextNumber | None]:
        """Begin a load on all ranks at once, and wait at its end for all of them; None: this rank sends everything.

        total: of the requests, if it is known. max_concurrency: of all ranks, 0 for no limit.
        After `stop` no more numbers are handed out.
        """
        yield None

    def merged(self, load: LoadResult) -> LoadResult:
        """The load of all ranks, on rank 0; the others have no records of it."""
        return load

    def leave(self) -> None:
        """End what is done together; on rank 0, once the others have had the time to end."""

    def quit(self, exit_code: int) -> None:
        """End this rank at once, and with it all others, wherever they are; one alone goes on."""

    def abort(self) -> None:
        """Print the unexpected exception that is being handled, and end all ranks."""
