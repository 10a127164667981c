"""How many sequences of batches are under way at once: few while anybody else uses the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from eventlm.engine.admin import ReadStatus
from eventlm.engine.request import EngineUnavailableError
from eventlm.text.engine import Engine

#: How often to look whether others use the engine.
POLL_SECONDS = 0.1
#: For how long batches hold back after others: somebody who chats is likely to send another request soon.
QUIET_SECONDS = 1.0
_NS = 1_000_000_000
#: While batches hold back, they take this share of the window.
HELD_BACK_SHARE = 4

IsBusy = Callable[[], Awaitable[bool]]


class Others:
    """Whether others use the engine, or have used it just now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looked_ns = self._seen_ns = -(1 << 62)

    async def are_there(self) -> bool:
        """Look at the engine, unless that was done just now."""
        now_ns = self._engine.now_ns()
        if now_ns - self._looked_ns >= POLL_SECONDS * _NS:
            self._looked_ns = now_ns
            if await self._use_the_engine():
                self._seen_ns = now_ns
        return now_ns - self._seen_ns < QUIET_SECONDS * _NS

    async def _use_the_engine(self) -> bool:
        try:
            status = await self._engine.administer(ReadStatus())
        except EngineUnavailableError:
            return False
        return status.num_requests > status.num_at_lowest_priority


async def _never_busy() -> bool:
    return False


class Window:
    """Room for so many sequences at once, or for a quarter of them while `is_busy`. A line with more gets all of it."""

    def __init__(self, num_sequences: int, is_busy: IsBusy = _never_busy) -> None:
        self._size = num_sequences
        self._is_busy = is_busy
        self._num_taken = 0
        self._given = asyncio.Event()
        #: A line with many sequences must not be overtaken for ever.
        self._turn = asyncio.Lock()

    async def take(self, num_sequences: int) -> None:
        """Wait for room. The first to come is the first to get it."""
        async with self._turn:
            while not await self._has_room(num_sequences):
                await self.wait_for_change(POLL_SECONDS)
            self._num_taken += num_sequences

    async def _has_room(self, num_sequences: int) -> bool:
        wanted = self._num_taken + num_sequences
        if wanted > self._size // HELD_BACK_SHARE and self._num_taken and wanted <= self._size:
            return not await self._is_busy()
        return not self._num_taken or wanted <= self._size

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until some room is given back, but not longer."""
        self._given.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._given.wait()

    def give(self, num_sequences: int) -> None:
        """Give it back."""
        self._num_taken -= num_sequences
        self._given.set()
