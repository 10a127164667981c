from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import read_history
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.subscription import Lagged, Subscription
from eventlm.events import Arrived, End, Event, Fact, Finished
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import traces

MADE = traces.events(200)


def recorded(first_s: int, last_s: int) -> Iterator[Event]:
    return iter(MADE[first_s : last_s + 1])


async def take_all(subscription: Subscription) -> list[Event | Lagged]:
    return [item async for item in subscription]


async def test_live_events_come_in_order_until_the_bus_closes() -> None:
    bus = Bus()
    bus.publish(MADE[:3])
    reader = asyncio.create_task(take_all(bus.subscribe()))
    await asyncio.sleep(0)
    for s in range(3, 20):
        bus.publish(MADE[s : s + 1])
        await asyncio.sleep(0)
    bus.publish(MADE[20:25])
    bus.close()
    assert await reader == MADE[3:25]
    assert bus.num_subscriptions == 0


async def test_what_comes_between_subscribing_and_reading_is_not_missed() -> None:
    bus = Bus()
    subscription = bus.subscribe()
    bus.publish(MADE[:5])
    bus.close()
    assert await take_all(subscription) == MADE[:5]


async def test_subscribing_to_a_closed_bus_ends_at_once_after_the_history() -> None:
    bus = Bus(history=recorded)
    bus.publish(MADE[:5])
    bus.close()
    assert await take_all(bus.subscribe()) == []
    assert await take_all(bus.subscribe(from_seq=3)) == MADE[3:5]
    assert bus.num_subscriptions == 0


async def test_kinds_are_classes_or_their_bases() -> None:
    bus = Bus(history=recorded)
    bus.publish(MADE[:100])
    for kinds in [(Arrived,), (Finished, End), (Fact,)]:
        subscription = bus.subscribe(kinds=kinds, from_seq=0)
        live = bus.subscribe(kinds=kinds)
        assert [await anext(subscription)] == [e for e in MADE if isinstance(e, kinds)][:1]
        del subscription
        assert bus.num_subscriptions == 1
        await live.aclose()
    whole = asyncio.create_task(take_all(bus.subscribe(kinds=(Fact,), from_seq=0)))
    await asyncio.sleep(0)
    bus.publish(MADE[100:])
    bus.close()
    assert await whole == [event for event in MADE if isinstance(event, Fact)]


async def test_history_comes_first_and_is_read_from_a_real_trace(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run") as writer:
        bus = Bus(history=lambda first_s, last_s: read_history(writer.path, first_s, last_s))

        def publish(events: list[Event]) -> None:
            for event in events:
                writer.append(encode_body(event))
            writer.flush()
            bus.publish(events)

        publish(MADE[:120])
        subscription = bus.subscribe(from_seq=50)
        got = [await anext(subscription) for _ in range(60)]
        publish(MADE[120:150])
        got += [await anext(subscription) for _ in range(40)]
        assert bus.num_subscriptions == 0
        rest = asyncio.create_task(take_all(subscription))
        await asyncio.sleep(0)
        assert bus.num_subscriptions == 1
        publish(MADE[150:])
        bus.close()
        assert got + await rest == MADE[50:]


async def test_reading_history_lets_the_loop_run() -> None:
    bus = Bus(history=recorded)
    bus.publish(MADE)
    subscription = bus.subscribe(from_seq=0)
    turns = []

    async def count_turns() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    for _ in range(len(MADE)):
        await anext(subscription)
    counter.cancel()
    assert len(turns) >= len(MADE) // 32


async def test_without_history_the_first_item_says_what_is_missing() -> None:
    bus = Bus()
    bus.publish(MADE[:10])
    subscription = bus.subscribe(from_seq=4)
    bus.publish(MADE[10:12])
    bus.close()
    assert await take_all(subscription) == [Lagged(4, 9), *MADE[10:12]]


async def test_a_hole_in_the_history_is_a_lag() -> None:
    def with_holes(first_s: int, last_s: int) -> Iterator[Event]:
        return (MADE[s] for s in range(first_s, last_s + 1) if s in (3, 4, 7))

    bus = Bus(history=with_holes)
    bus.publish(MADE[:10])
    bus.close()
    expected = [Lagged(2, 2), MADE[3], MADE[4], Lagged(5, 6), MADE[7], Lagged(8, 9)]
    assert await take_all(bus.subscribe(from_seq=2)) == expected


async def test_a_subscription_may_begin_in_the_future() -> None:
    bus = Bus(history=recorded)
    subscription = bus.subscribe(from_seq=5)
    bus.publish(MADE[:3])
    bus.publish(MADE[3:8])
    bus.close()
    assert await take_all(subscription) == MADE[5:8]


async def test_a_slow_subscriber_loses_the_oldest_and_gets_one_notice() -> None:
    bus = Bus()
    subscription = bus.subscribe(capacity=4)
    for s in range(10):
        bus.publish(MADE[s : s + 1])
    assert await anext(subscription) == Lagged(0, 5)
    assert await anext(subscription) == MADE[6]
    bus.publish(MADE[10:30])
    bus.close()
    assert await take_all(subscription) == [Lagged(7, 25), *MADE[26:30]]


async def test_leaving_the_loop_detaches() -> None:
    bus = Bus()
    reads = []

    async def read_two() -> None:
        async for event in bus.subscribe():
            reads.append(event)
            if len(reads) == 2:
                break

    task = asyncio.create_task(read_two())
    await asyncio.sleep(0)
    assert bus.num_subscriptions == 1
    bus.publish(MADE[:4])
    await task
    assert reads == MADE[:2]
    assert bus.num_subscriptions == 0


async def test_a_cancelled_reader_detaches() -> None:
    bus = Bus()
    task = asyncio.create_task(take_all(bus.subscribe()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    assert bus.num_subscriptions == 0


async def test_aclose_detaches_and_ends_a_waiting_reader() -> None:
    bus = Bus()
    subscription = bus.subscribe()
    reader = asyncio.create_task(take_all(subscription))
    await asyncio.sleep(0)
    await subscription.aclose()
    assert bus.num_subscriptions == 0
    assert await reader == []
    async with bus.subscribe() as subscription:
        bus.publish(MADE[:1])
        assert await anext(subscription) == MADE[0]
    assert bus.num_subscriptions == 0
    assert await take_all(subscription) == []


async def test_a_history_that_fails_ends_its_subscription_only() -> None:
    def fails(first_s: int, last_s: int) -> Iterator[Event]:
        yield MADE[first_s]
        raise OSError("disk")

    bus = Bus(history=fails)
    bus.publish(MADE[:5])
    subscription = bus.subscribe(from_seq=1)
    assert await anext(subscription) == MADE[1]
    with pytest.raises(OSError, match="disk"):
        await anext(subscription)
    assert await take_all(subscription) == []
    bus.publish(MADE[5:6])


async def test_two_readers_of_one_subscription_are_refused() -> None:
    bus = Bus()
    subscription = bus.subscribe()
    first = asyncio.ensure_future(anext(subscription))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one task only"):
        await anext(subscription)
    bus.publish(MADE[:1])
    assert await first == MADE[0]


@pytest.mark.parametrize("arguments", [{"from_seq": -1}, {"capacity": 0}])
async def test_nonsense_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Bus().subscribe(**arguments)


def _covered(items: list[Event | Lagged], from_seq: int, kinds: tuple[type[Event], ...] | None) -> int:
    """Check that the items go on from `from_seq` without gap or duplicate; where they end."""
    next_s = from_seq
    for item in items:
        if isinstance(item, Lagged):
            first, last = item.from_seq, item.to_seq
            assert next_s <= first <= last
        else:
            first = last = item.s
            assert item is MADE[item.s]
        between = MADE[next_s:first]
        assert not between if kinds is None else not any(isinstance(event, kinds) for event in between)
        next_s = last + 1
    return next_s


@settings(max_examples=300)
@given(
    actions=st.lists(st.one_of(st.integers(1, 9), st.just("read"), st.just("turn")), max_size=60),
    published_before=st.integers(0, 80),
    from_seq=st.none() | st.integers(0, 100),
    capacity=st.integers(1, 12) | st.just(len(MADE)),
    kinds=st.sampled_from([None, (Fact,), (Arrived, Finished)]),
    has_history=st.booleans(),
)
def test_no_gap_and_no_duplicate_however_reading_and_publishing_interleave(
    actions: list[int | str],
    published_before: int,
    from_seq: int | None,
    capacity: int,
    kinds: tuple[type[Event], ...] | None,
    has_history: bool,
) -> None:
    async def run() -> None:
        bus = Bus(history=recorded if has_history else None)
        bus.publish(MADE[:published_before])
        subscription = bus.subscribe(kinds=kinds, from_seq=from_seq, capacity=capacity)
        items: list[Event | Lagged] = []
        waiting: asyncio.Future[Event | Lagged] | None = None
        for action in actions:
            if isinstance(action, int):
                bus.publish(MADE[bus.next_s : bus.next_s + action])
            elif action == "read" and waiting is None:
                waiting = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(0)
            if waiting is not None and waiting.done():
                items.append(waiting.result())
                waiting = None
        bus.close()
        if waiting is not None:
            await asyncio.wait([waiting])
            if waiting.exception() is None:
                items.append(waiting.result())
        items += await take_all(subscription)
        start = published_before if from_seq is None else from_seq
        end = _covered(items, start, kinds)
        rest = MADE[max(end, start) : bus.next_s]
        assert not rest if kinds is None else not any(isinstance(event, kinds) for event in rest)
        if has_history and capacity == len(MADE):
            assert not any(isinstance(item, Lagged) for item in items)

    asyncio.run(run())
