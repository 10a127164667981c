"""What the timelines of all sequences have in common."""

from __future__ import annotations

from eventlm.replay.explain.life import Life, order_of
from eventlm.types import SequenceId
from tests.core.test_forwarding import Backends


def test_intervals_have_no_gaps_and_name_who_was_ahead() -> None:
    rig = Backends(1, limit=1)
    first, second = rig.arrive(), rig.arrive()
    life = Life(rig.sequence(second), rig.state)
    reason = life.watch.look(rig.state, life.sequence)
    assert reason is not None
    life.go_on_waiting(rig.state, reason)
    life.note_admitted(0, [SequenceId(99, 0)])
    life.note_admitted(1, [SequenceId(98, 0)])
    start_ns = life.cursor_ns
    life.close_wait(start_ns + 5)
    life.emit(start_ns + 5, "prefill", "first_token")
    life.emit(start_ns + 8, "prefill", "first_token", replica=0)
    waited, served = life.explanation("stop", 1, 0).intervals
    assert (waited.cause, waited.limit, waited.held_by) == ("backend_limit", 1, [SequenceId(first, 0)])
    assert waited.admitted == [SequenceId(99, 0)]
    assert (waited.end_ns, served.start_ns, served.end_ns) == (start_ns + 5, start_ns + 5, start_ns + 8)


def test_only_who_is_more_urgent_goes_first() -> None:
    rig = Backends(1, limit=1)
    first, second = rig.sequence(rig.arrive()), rig.sequence(rig.arrive())
    order = order_of(rig.state, first, (0, 1, *first.id), (0, 2, *second.id))
    assert order is not None
    assert (order.other, order.other_urgency, order.own_urgency) == (first.id, (0, 1), (0, 2))
    assert order_of(rig.state, second, (0, 2, *second.id), (0, 1, *first.id)) is None
