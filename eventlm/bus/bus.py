"""The bus: delivers stamped events to handlers and subscribers, in the order of the log.

Handlers are called in the publisher's own stack, event by event, in the order in which they were attached.
Subscriptions are read by other tasks of the same loop, from a bounded buffer each. Neither can harm the
publisher: a handler that raises is detached and reported, a slow subscriber receives a note of what it missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from eventlm.bus.subscription import LiveBuffer, Subscription
from eventlm.events import Event

Handler = Callable[[Event], None]
#: Called with a handler that raised, the event it was called with, and what it raised.
OnBroken = Callable[[Handler, Event, Exception], None]
#: Called with two positions: the recorded events from the first to the second, both included.
History = Callable[[int, int], Iterator[Event]]


class Bus:
    """Delivers events in the order of their `s`. For use within one thread.

    next_s is the `s` of the next event to be published. `history` must know an event by the time it is
    published (so flush the log, then publish, or flush in `history`); without it there is nothing before
    `next_s`.
    """

    def __init__(self, *, next_s: int = 0, history: History | None = None, on_broken: OnBroken | None = None) -> None:
        self.next_s = next_s
        self.closed = False
        self._history = history
        self._on_broken = on_broken
        self._handlers: tuple[Handler, ...] = ()
        self._buffers: tuple[LiveBuffer, ...] = ()

    def attach(self, handler: Handler) -> None:
        """Call `handler` with every event from now on, after those attached before it."""
        self._handlers = (*self._handlers, handler)

    def detach(self, handler: Handler) -> None:
        """Stop calling `handler`; nothing happens if it is not attached."""
        self._handlers = tuple(other for other in self._handlers if other != handler)

    def publish(self, events: Sequence[Event]) -> None:
        """Deliver the events of one drain, whose `s` go on from the last one published (else ValueError)."""
        if not events:
            return
        first_s, next_s = events[0].s, events[-1].s + 1
        if first_s != self.next_s or next_s - first_s != len(events):
            raise ValueError(f"events {first_s} to {next_s - 1} published where event {self.next_s} is next")
        self.next_s = next_s
        if self._handlers:
            for event in events:
                for handler in self._handlers:
                    try:
                        handler(event)
                    except Exception as error:
                        self._break(handler, event, error)
        for buffer in self._buffers:
            buffer.offer(events)

    def _break(self, handler: Handler, event: Event, error: Exception) -> None:
        self.detach(handler)
        if self._on_broken is not None:
            self._on_broken(handler, event, error)

    def subscribe(
        self,
        *,
        kinds: tuple[type[Event], ...] | None = None,
        from_seq: int | None = None,
        capacity: int = 1024,
    ) -> Subscription:
        """Iterate over the events of `kinds` (classes; None: all) from `from_seq` (None: now) on.

        What lies before now is read from the history; where there is none, the first item is a Lagged. At
        most `capacity` events wait for the subscriber, then the oldest are dropped and a Lagged stands in
        their place. Closing the bus ends the iteration after the last event; dropping or closing the
        subscription detaches it.
        """
        return Subscription(
            self, kinds=kinds, from_seq=self.next_s if from_seq is None else from_seq, capacity=capacity
        )

    @property
    def history(self) -> History | None:
        """Where subscriptions read what was published before they came."""
        return self._history

    def add_buffer(self, buffer: LiveBuffer) -> None:
        """Offer every drain to `buffer` from now on."""
        self._buffers = (*self._buffers, buffer)

    def remove_buffer(self, buffer: LiveBuffer) -> None:
        """Stop offering to `buffer`; nothing happens if it is not known."""
        self._buffers = tuple(other for other in self._buffers if other is not buffer)

    @property
    def num_subscriptions(self) -> int:
        """Subscriptions that are read live."""
        return len(self._buffers)

    def close(self) -> None:
        """End all subscriptions after the last published event."""
        self.closed = True
        for buffer in self._buffers:
            buffer.wake()
