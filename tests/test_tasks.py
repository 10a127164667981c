"""Work that an event can end, and work in bounded parts."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.tasks import completed, gathered, together


async def test_work_that_ends_first_gives_its_result() -> None:
    stop = asyncio.Event()
    done = await completed(asyncio.sleep(0, "result"), stop)
    assert done is not None
    assert done.result() == "result"


async def test_the_event_cancels_the_work_and_waits_for_its_end() -> None:
    stop = asyncio.Event()
    ended = []

    async def work() -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    assert await completed(work(), stop) is None
    assert ended == [True]


async def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await completed(work(), asyncio.Event())


async def test_work_is_under_way_for_so_many_at_once() -> None:
    under_way: list[int] = []
    most = 0

    async def work(item: int) -> int:
        nonlocal most
        under_way.append(item)
        most = max(most, len(under_way))
        await asyncio.sleep(0)
        under_way.remove(item)
        return -item

    assert await gathered(work, range(10), at_once=3) == [-item for item in range(10)]
    assert most == 3


async def test_the_first_failure_ends_the_others_before_it_is_raised() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        await together(work(), fail(), work())
    assert ended == [True, True]
