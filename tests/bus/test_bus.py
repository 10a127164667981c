from __future__ import annotations

import pytest

from eventlm.bus.bus import Bus
from eventlm.events import Event
from tests.bus import traces

MADE = traces.events(10)


def test_every_handler_sees_every_event_in_order_before_the_next_event() -> None:
    bus, seen = Bus(), []
    bus.attach(lambda event: seen.append(("a", event.s)))
    bus.attach(lambda event: seen.append(("b", event.s)))
    bus.publish(MADE[:2])
    bus.publish([])
    bus.publish(MADE[2:3])
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert bus.next_s == 3


def test_attach_and_detach_take_effect_at_the_next_event() -> None:
    bus, seen = Bus(), []

    def late(event: Event) -> None:
        seen.append(("late", event.s))

    def switch(event: Event) -> None:
        seen.append(("switch", event.s))
        if event.s == 0:
            bus.attach(late)
        if event.s == 2:
            bus.detach(late)

    bus.attach(switch)
    bus.publish(MADE[:4])
    assert seen == [("switch", 0), ("switch", 1), ("late", 1), ("switch", 2), ("late", 2), ("switch", 3)]
    bus.detach(late)


def test_a_handler_that_raises_is_detached_and_reported_without_effect_on_others() -> None:
    broken, seen = [], []
    bus = Bus(on_broken=lambda handler, event, error: broken.append((handler, event.s, str(error))))

    def fail(event: Event) -> None:
        seen.append(("fail", event.s))
        if event.s == 1:
            raise ValueError("boom")

    bus.attach(lambda event: seen.append(("before", event.s)))
    bus.attach(fail)
    bus.attach(lambda event: seen.append(("after", event.s)))
    bus.publish(MADE[:3])
    bus.publish(MADE[3:4])
    assert broken == [(fail, 1, "boom")]
    assert [s for name, s in seen if name == "before"] == [0, 1, 2, 3]
    assert [s for name, s in seen if name == "after"] == [0, 1, 2, 3]
    assert [s for name, s in seen if name == "fail"] == [0, 1]


def test_a_broken_handler_needs_no_reporter() -> None:
    bus = Bus()
    bus.attach(lambda event: 1 // 0)
    bus.publish(MADE)


@pytest.mark.parametrize("events", [MADE[1:3], [MADE[0], MADE[2]], [MADE[0], MADE[0]], [MADE[1], MADE[0]]])
def test_events_out_of_order_are_refused(events: list[Event]) -> None:
    bus, seen = Bus(), []
    bus.attach(seen.append)
    with pytest.raises(ValueError, match="where event 0 is next"):
        bus.publish(events)
    assert seen == []
    bus.publish(MADE[:1])


def test_a_bus_may_begin_in_the_middle_of_a_log() -> None:
    bus = Bus(next_s=4)
    bus.publish(MADE[4:])
    assert bus.next_s == 10
