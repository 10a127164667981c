"""Virtual time goes from one thing that is due to the next."""

from __future__ import annotations

from functools import partial

from eventlm.replay.simulate.clock import VirtualClock


def test_what_is_due_at_one_time_is_done_together_by_rank_then_in_the_order_of_asking() -> None:
    clock = VirtualClock()
    done: list[str] = []
    for due_ns, rank, name in ((5, 1, "b"), (5, 1, "c"), (9, 0, "d"), (5, 0, "a")):
        clock.at(due_ns, partial(done.append, name), rank)
    assert (clock.advance(), done, clock.now_ns()) == (5, ["a", "b", "c"], 5)
    assert clock.has_more
    assert (clock.advance(), done[3:]) == (9, ["d"])
    assert not clock.has_more


def test_what_is_asked_for_now_is_done_in_the_same_advance() -> None:
    clock = VirtualClock()
    done: list[int] = []
    clock.at(5, lambda: clock.at(clock.now_ns(), lambda: done.append(clock.now_ns())))
    assert (clock.advance(), done, clock.has_more) == (5, [5], False)
