"""Where the engine's outputs of a group wait for the one who makes text of them."""

from __future__ import annotations

import asyncio
from typing import cast

from eventlm.engine.request import RequestOutput, TakenOver
from eventlm.errors import EventLMError


class OutputQueue:
    """What the engine says of a group, in its order, until the one who reads it takes it."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, RequestOutput | TakenOver | EventLMError]] = []
        self._waiter: asyncio.Future[None] | None = None
        #: How many of them are no outputs.
        self._num_errors = 0
        #: Requests of which an error was taken: nothing more comes of them.
        self.failed: set[int] = set()

    def __len__(self) -> int:
        return len(self._outputs)

    def put_again(self, place: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """As `put`, for who reads a reply again: once another one does, nothing waits here for this one."""
        if isinstance(output, TakenOver):
            self._outputs.clear()
        self.put(place, output)

    def put(self, place: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """The engine's side: `place` is that of the request in its group."""
        self._outputs.append((place, output))
        if isinstance(output, EventLMError | TakenOver):
            self._num_errors += 1
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, least: int) -> None:
        """Until there are so many outputs, or an error."""
        while len(self._outputs) < least and not self._num_errors:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int) -> list[tuple[int, RequestOutput]]:
        """What there is, `most` at most and up to an error; if that comes first it is raised."""
        outputs = self._outputs
        if not self._num_errors and len(outputs) <= most:
            self._outputs = []
            return cast("list[tuple[int, RequestOutput]]", outputs)
        num_taken = 0
        while num_taken < min(most, len(outputs)) and not isinstance(outputs[num_taken][1], EventLMError | TakenOver):
            num_taken += 1
        if not num_taken:
            self._num_errors -= 1
            place, error = outputs.pop(0)
            if isinstance(error, EventLMError):
                self.failed.add(place)
                raise error
            raise TakenOverError()
        self._outputs = outputs[num_taken:]
        return cast("list[tuple[int, RequestOutput]]", outputs[:num_taken])


class TakenOverError(EventLMError):
    """Somebody else reads the outputs from now on. Those of who submitted the group go on nevertheless."""
