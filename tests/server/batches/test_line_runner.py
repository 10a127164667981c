"""The window: room for so many sequences, first come first served."""

from __future__ import annotations

import asyncio

from eventlm.server.batches.line_runner import Window


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_window_has_room_for_so_many_and_for_one_that_is_larger() -> None:
    window = Window(4)
    taken: list[str] = []

    async def take(name: str, num_sequences: int) -> None:
        await window.take(num_sequences)
        taken.append(name)

    tasks = [asyncio.create_task(take(*each)) for each in (("a", 3), ("b", 1), ("large", 9), ("c", 1))]
    await settle()
    assert taken == ["a", "b"]
    window.give(3)
    await settle()
    # Nothing overtakes the large one, although there would be room.
    assert taken == ["a", "b"]
    window.give(1)
    await settle()
    assert taken == ["a", "b", "large"]
    window.give(9)
    await asyncio.gather(*tasks)
    assert taken == ["a", "b", "large", "c"]


async def test_who_gives_up_lets_the_next_one_in() -> None:
    window = Window(2)
    await window.take(2)
    waiting = [asyncio.create_task(window.take(2)), asyncio.create_task(window.take(1))]
    await settle()
    waiting[0].cancel()
    window.give(1)
    await waiting[1]
    assert waiting[0].cancelled()
