"""The queue of a group's outputs between the engine and the code that makes text of them."""

from __future__ import annotations

import asyncio
from typing import cast

from eventlm.engine.request import RequestOutput, TakenOver
from eventlm.errors import EventLMError


class OutputQueue:
    """The outputs of a group in the engine's order."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, RequestOutput | TakenOver | EventLMError]] = []
        self._waiter: asyncio.Future[None] | None = None
        #: How many of them are errors or `TakenOver`.
        self._num_errors = 0
        #: Requests whose error was taken. They have no more outputs.
        self.failed: set[int] = set()

    def __len__(self) -> int:
        return len(self._outputs)

    def put_again(self, index: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """As `put`, for a reader of a reply that another reader may take over. This one then gets no more outputs."""
        if isinstance(output, TakenOver):
            self._outputs.clear()
        self.put(index, output)

    def put(self, index: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        """The engine's side. `index` is the request's in its group."""
        self._outputs.append((index, output))
        if isinstance(output, EventLMError | TakenOver):
            self._num_errors += 1
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, least: int) -> None:
        """Wait for so many outputs, or an error."""
        while len(self._outputs) < least and not self._num_errors:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def take(self, most: int) -> list[tuple[int, RequestOutput]]:
        """Take up to `most` outputs before the next error. Raises that if it comes first."""
        outputs = self._outputs
        if not self._num_errors and len(outputs) <= most:
            self._outputs = []
            return cast("list[tuple[int, RequestOutput]]", outputs)
        num_taken = 0
        while num_taken < min(most, len(outputs)) and not isinstance(outputs[num_taken][1], EventLMError | TakenOver):
            num_taken += 1
        if not num_taken:
            self._num_errors -= 1
            index, error = outputs.pop(0)
            if isinstance(error, EventLMError):
                self.failed.add(index)
                raise error
            raise TakenOverError()
        self._outputs = outputs[num_taken:]
        return cast("list[tuple[int, RequestOutput]]", outputs[:num_taken])


class TakenOverError(EventLMError):
    """Another reader gets the outputs from now on."""
