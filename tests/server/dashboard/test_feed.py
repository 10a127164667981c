"""The feed of frames: one for all, none for nobody, and the newest for who is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import structs

from eventlm.engine.request import EngineUnavailableError
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics, RecorderMetrics
from eventlm.metrics.histograms import Histogram
from eventlm.server.dashboard.feed import FeedFailedError, FrameFeed, LiveFrame, Watcher, live_frame
from tests.processes import PATIENCE_SECONDS, until
from tests.server.conftest import capture_logs
from tests.server.engine_double import EngineDouble, spell

T = TypeVar("T")


class CountingEngine(EngineDouble):
    """Counts how often its metrics are read; fails from a number on."""

    def __init__(self) -> None:
        super().__init__(spell(""))
        self.num_reads = 0
        self.fails_at = 10**9
        self.failure: Exception = EngineUnavailableError("the engine's process has died")

    async def read_metrics(self) -> EngineMetrics:
        self.num_reads += 1
        if self.num_reads >= self.fails_at:
            raise self.failure
        return await super().read_metrics()


def feed_of(engine: EngineDouble, *, interval_seconds: float = 0.01) -> FrameFeed:
    return FrameFeed(engine, interval_seconds=interval_seconds)


async def soon(awaited: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaited, PATIENCE_SECONDS)


async def frame_of(watcher: Watcher) -> LiveFrame:
    event = await soon(watcher.next())
    assert event is not None
    head, payload, tail = event[:6], event[6:-2], event[-2:]
    assert (head, tail) == (b"data: ", b"\n\n")
    assert b"\n" not in payload
    return msgspec.json.decode(payload, type=LiveFrame)


def tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[operator]


async def test_while_nobody_watches_there_is_no_task_and_nothing_is_read() -> None:
    engine = CountingEngine()
    feed = feed_of(engine)
    await asyncio.sleep(0.03)
    assert (tasks(), engine.num_reads) == (set(), 0)
    with feed.watch() as first, feed.watch() as second:
        await frame_of(first)
        await frame_of(second)
        assert [task.get_name() for task in tasks()] == ["dashboard frames"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    num_reads = engine.num_reads
    assert tasks() == set()
    await asyncio.sleep(0.03)
    assert engine.num_reads == num_reads
    # Whoever comes next begins anew.
    with feed.watch() as third:
        found = await frame_of(third)
        assert (found.number, found.frame.generation_tokens_per_s) == (1, None)


async def test_all_who_watch_get_the_same_bytes() -> None:
    engine = CountingEngine()
    feed = feed_of(engine)
    with feed.watch() as first:
        await frame_of(first)
        with feed.watch() as second:
            # Who comes later need not wait for a frame.
            assert await soon(second.next()) is feed.event
            for _ in range(5):
                one, other = await soon(asyncio.gather(first.next(), second.next()))
                assert one is other
            assert engine.num_reads <= feed.number + 1


async def test_who_is_slow_gets_the_newest() -> None:
    feed = feed_of(CountingEngine(), interval_seconds=0.001)
    with feed.watch() as slow, feed.watch() as fast:
        assert (await frame_of(slow)).number == 1
        while feed.number < 8:
            await frame_of(fast)
        number = feed.number
        assert (await frame_of(slow)).number == number


async def test_a_watcher_that_is_cancelled_disturbs_no_other() -> None:
    feed = feed_of(CountingEngine(), interval_seconds=0.02)
    with feed.watch() as first, feed.watch() as second:
        await frame_of(first)
        await frame_of(second)
        waiting = asyncio.create_task(first.next())
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await frame_of(second)).number == 2


async def test_it_ends_with_the_server() -> None:
    feed = feed_of(CountingEngine(), interval_seconds=600)
    with feed.watch() as watcher:
        await frame_of(watcher)
        waiting = asyncio.create_task(watcher.next())
        await asyncio.sleep(0)
        feed.close()
        assert await soon(waiting) is None
        await asyncio.sleep(0)
        assert tasks() == set()
        with feed.watch() as late:
            assert await soon(late.next()) is None
    assert tasks() == set()


async def test_what_ends_it_is_told_and_it_can_begin_again() -> None:
    engine = CountingEngine()
    engine.fails_at = 3
    feed = feed_of(engine)
    with feed.watch() as watcher:
        await frame_of(watcher)
        await frame_of(watcher)
        with pytest.raises(EngineUnavailableError):
            await soon(watcher.next())
        engine.fails_at = 10**9
        with feed.watch() as late:
            assert (await frame_of(late)).number == 1


async def test_who_wakes_after_it_has_begun_anew_goes_on_with_it() -> None:
    engine = CountingEngine()
    feed = feed_of(engine)
    with feed.watch() as watcher:
        before = await frame_of(watcher)
        engine.fails_at = 0
        await until(lambda: feed.error is not None)
        engine.fails_at = 10**9
        with feed.watch():
            after = await frame_of(watcher)
    assert after.number == 1
    assert after.frame.end_ns > before.frame.end_ns


async def test_a_bug_ends_it_too_and_is_logged() -> None:
    engine = CountingEngine()
    engine.fails_at, engine.failure = 2, RuntimeError("a bug")
    with capture_logs() as logs, feed_of(engine).watch() as watcher:
        await frame_of(watcher)
        with pytest.raises(FeedFailedError, match="log"):
            await soon(watcher.next())
    assert [each["event"] for each in logs] == ["the dashboard's frames cannot be made"]


async def test_what_is_not_in_the_log() -> None:
    before = await EngineDouble(spell("")).read_metrics()
    recorder = RecorderMetrics(num_bytes=5, num_events_behind=7, is_writing=True, sync_time=Histogram.over(()))
    fronts = [FrontEndMetrics(index=index, is_up=index == 1, num_restarts=0) for index in (1, 2)]
    after = structs.replace(
        before,
        now_ns=before.now_ns + 10**9,
        rate_limited={"": 3, "gold": 1},
        recorder=recorder,
        front_ends=fronts,
        state="draining",
    )
    found = live_frame(4, structs.replace(before, rate_limited={"gold": 1}), after)
    assert (found.number, found.state, found.num_rate_limited) == (4, "draining", 3)
    assert (found.is_recording, found.num_events_behind) == (True, 7)
    assert (found.num_front_ends, found.num_front_ends_up) == (2, 1)
    assert found.frame.end_ns - found.frame.start_ns == 10**9
    full = structs.replace(after, recorder=structs.replace(recorder, is_writing=False))
    assert not live_frame(5, before, full).is_recording
