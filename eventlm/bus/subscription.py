"""The asynchronous side of the bus: one subscriber's way from the history into the live stream.

A subscription that begins in the past reads the history in rounds, each up to what has been published by then, and goes
live at a moment when nothing is left to read. Nothing can be published in between, so there is no gap and no duplicate.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from eventlm.events import Event

#: How many events of the history are read before the loop gets a turn.
_EVENTS_PER_TURN = 32


class Lagged(Struct, frozen=True):
    """Stands where events are missing: those from `from_seq` to `to_seq`, both included, cannot be had any
    more."""

    from_seq: int
    to_seq: int


class EventSource(Protocol):
    """What a subscription needs of the bus that it reads."""

    next_s: int
    closed: bool

    @property
    def history(self) -> Callable[[int, int], Iterator[Event]] | None:
        """Reads recorded events, from the first position to the second, both included."""
        ...

    def add_buffer(self, buffer: LiveBuffer) -> None:
        """Offer every drain to `buffer` from now on."""
        ...

    def remove_buffer(self, buffer: LiveBuffer) -> None:
        """Stop offering to `buffer`."""
        ...


class LiveBuffer:
    """The newest `capacity` events that one subscriber has not taken yet; in place of older ones a Lagged."""

    def __init__(self, *, kinds: tuple[type[Event], ...] | None, from_seq: int, capacity: int) -> None:
        self._kinds = kinds
        self._from_seq = from_seq
        self._capacity = capacity
        self._lagged: Lagged | None = None
        self._items: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, events: Sequence[Event]) -> None:
        """Keep the events that the subscriber wants, drop the oldest that do not fit, wake the subscriber."""
        if events[0].s < self._from_seq:
            events = [event for event in events if event.s >= self._from_seq]
        if self._kinds is not None:
            kinds = self._kinds
            events = [event for event in events if isinstance(event, kinds)]
        items = self._items
        items.extend(events)
        if len(items) > self._capacity:
            first = items[0].s
            while len(items) > self._capacity:
                last = items.popleft().s
            self.lag(first, last)
        if items:
            self.wake()

    def lag(self, from_seq: int, to_seq: int) -> None:
        """Events just before the first kept one are gone."""
        self._lagged = Lagged(self._lagged.from_seq if self._lagged else from_seq, to_seq)

    def take(self) -> Event | Lagged | None:
        """The next item, or None if there is none yet."""
        if self._lagged is not None:
            lagged, self._lagged = self._lagged, None
            return lagged
        return self._items.popleft() if self._items else None

    async def wait(self) -> None:
        """Return once `wake` is called. Raises RuntimeError if another task waits already."""
        if self._waiter is not None:
            raise RuntimeError("a subscription is read by one task only")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Let the subscriber look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Drop what is kept."""
        self._lagged = None
        self._items.clear()


class Subscription:
    """An asynchronous iterator over events and, where some are missing, Lagged items. Made by
    `Bus.subscribe`.

    It is detached from the bus when it is closed or no longer referred to, thus when its `async for` is left.
    """

    _buffer: LiveBuffer | None = None

    def __init__(
        self, bus: EventSource, *, kinds: tuple[type[Event], ...] | None, from_seq: int, capacity: int
    ) -> None:
        if from_seq < 0 or capacity < 1:
            raise ValueError(f"from_seq {from_seq} must be at least 0 and capacity {capacity} at least 1")
        self._bus = bus
        self._kinds = kinds
        self._next_s = from_seq
        self._capacity = capacity
        self._closed = False
        self._past: Iterator[Event | Lagged] | None = None
        self._num_read = 0
        if bus.history is None or from_seq >= bus.next_s:
            self._go_live()

    def _go_live(self) -> LiveBuffer:
        buffer = LiveBuffer(kinds=self._kinds, from_seq=self._next_s, capacity=self._capacity)
        if self._next_s < self._bus.next_s:
            buffer.lag(self._next_s, self._bus.next_s - 1)
        self._bus.add_buffer(buffer)
        self._buffer = buffer
        return buffer

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event | Lagged:
        if self._buffer is None:
            item = await self._next_past()
            if item is not None:
                return item
        while not self._closed:
            buffer = self._buffer or self._go_live()
            item = buffer.take()
            if item is not None:
                return item
            if self._bus.closed:
                break
            await buffer.wait()
        await self.aclose()
        raise StopAsyncIteration

    async def _next_past(self) -> Event | Lagged | None:
        """The next item from the history; None once all that has been published was read, or when closed."""
        while not self._closed:
            if self._past is None:
                if self._next_s >= self._bus.next_s:
                    return None
                self._past = self._begin_round(self._bus.next_s - 1)
            self._num_read += 1
            if self._num_read % _EVENTS_PER_TURN == 0:
                await asyncio.sleep(0)
                continue
            try:
                item = next(self._past, None)
            except Exception:
                await self.aclose()
                raise
            if item is None:
                self._past = None
            elif self._kinds is None or isinstance(item, (Lagged, *self._kinds)):
                return item
        return None

    def _begin_round(self, last_s: int) -> Iterator[Event | Lagged]:
        assert self._bus.history is not None
        first_s, self._next_s = self._next_s, last_s + 1
        return _without_holes(self._bus.history(first_s, last_s), first_s, last_s)

    async def aclose(self) -> None:
        """Detach from the bus; a task that waits for the next event sees the iteration end."""
        self._closed = True
        self._past = None
        if self._buffer is not None:
            self._bus.remove_buffer(self._buffer)
            self._buffer.clear()
            self._buffer.wake()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._buffer is not None:
            self._bus.remove_buffer(self._buffer)


def _without_holes(events: Iterator[Event], first_s: int, last_s: int) -> Iterator[Event | Lagged]:
    for event in events:
        if event.s > first_s:
            yield Lagged(first_s, event.s - 1)
        yield event
        first_s = event.s + 1
    if first_s <= last_s:
        yield Lagged(first_s, last_s)
