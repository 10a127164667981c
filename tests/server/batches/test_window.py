"""The window: room for so many sequences, first come first served, and for few while there are others."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.engine.request import EngineUnavailableError
from eventlm.server.batches import window as windows
from eventlm.server.batches.window import Others, Window
from tests.server.engine_double import EngineDouble, spell


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


async def test_a_quarter_is_taken_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "POLL_SECONDS", 0.001)
    is_busy = True

    async def look() -> bool:
        return is_busy

    window = Window(8, look)
    # Two, and one that is larger if nothing else runs.
    for num_sequences in (1, 1):
        await window.take(num_sequences)
    more = asyncio.create_task(window.take(1))
    await asyncio.sleep(0.01)
    assert not more.done()
    window.give(2)
    await more
    window.give(1)
    await window.take(5)
    rest = asyncio.create_task(window.take(3))
    await asyncio.sleep(0.01)
    assert not rest.done()
    is_busy = False
    await rest


async def test_others_are_there_until_some_time_after_their_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineDouble(spell("hi"))
    now_ns = 0
    monkeypatch.setattr(engine, "now_ns", lambda: now_ns)
    others = Others(engine)
    found = []
    for num_requests in (0, 3, 0, 0, 0):
        engine.num_requests_of_others = num_requests
        found.append(await others.are_there())
        now_ns += 400_000_000
    assert found == [False, True, True, True, False]
    # Looks that follow each other closely are one.
    assert await others.are_there() is False
    engine.num_requests_of_others = 3
    assert await others.are_there() is False
    assert len(engine.actions) == 6


async def test_an_engine_that_cannot_say_has_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineDouble(spell("hi"))

    async def fail(action: object) -> None:
        raise EngineUnavailableError("dead")

    monkeypatch.setattr(engine, "administer", fail)
    assert await Others(engine).are_there() is False
