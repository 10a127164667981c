"""Work that an event can end, and work in bounded parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
ItemT = TypeVar("ItemT")


async def completed(work: Awaitable[T], stop: asyncio.Event) -> asyncio.Future[T] | None:
    """Await `work` and return it as a future with its result; if `stop` is set first, cancel it and return None."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        task.result()
        return task
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Await all; if one fails, cancel the others and raise what it raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(work: Callable[[ItemT], Awaitable[T]], items: Iterable[ItemT], *, at_once: int) -> list[T]:
    """The results of `work` for each item, in their order; it is under way for `at_once` of them at most."""
    places = asyncio.Semaphore(at_once)

    async def one(item: ItemT) -> T:
        async with places:
            return await work(item)

    return await asyncio.gather(*(one(item) for item in items))
