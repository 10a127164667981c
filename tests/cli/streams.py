"""Concurrent streaming clients from the openai package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from tests.processes import PATIENCE_SECONDS


class Stream:
    """One streamed completion: what its client has seen so far."""

    def __init__(self, client: openai.AsyncOpenAI, **fields: Any) -> None:
        self.seed: int = fields.get("seed", 0)
        self.id = ""
        self.text = ""
        self.finish_reason = ""
        self.error: Exception | None = None
        self._progress = asyncio.Event()
        self._client = client
        self._fields = fields

    async def run(self, *, leave_after: int | None = None) -> Stream:
        """Read to the end, or leave once there are so many characters. An error is kept, not raised."""
        try:
            async with await self._client.completions.create(stream=True, **self._fields) as chunks:
                async for chunk in chunks:
                    [choice] = chunk.choices
                    self.id = chunk.id
                    self.text += choice.text
                    self.finish_reason = choice.finish_reason or ""
                    self._progress.set()
                    if leave_after is not None and len(self.text) >= leave_after:
                        break
        except Exception as error:
            self.error = error
        self._progress.set()
        return self

    async def wait_for_text(self, num_characters: int) -> None:
        """Wait until the client has seen so much, or an error."""
        while len(self.text) < num_characters and self.error is None:
            self._progress.clear()
            await self._progress.wait()


async def until_all_have(streams: list[Stream], num_characters: int) -> None:
    """Wait until every client has seen so much text."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*(stream.wait_for_text(num_characters) for stream in streams))


@asynccontextmanager
async def going_on(*streams: Stream) -> AsyncIterator[None]:
    """Within it streams go on that are too long to end, and all of which have begun; then their clients leave."""
    running = [asyncio.create_task(stream.run()) for stream in streams]
    try:
        await until_all_have(list(streams), 1)
        yield
        assert not any(task.done() for task in running), [stream.error for stream in streams]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
