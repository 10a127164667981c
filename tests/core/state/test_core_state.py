"""Digests tell states apart by component, and timers of requests that ended do not pile up."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.events import CacheFlushed, Cancelled, Fact, Paused, PolicySwapped, PredictorSwapped, Resumed, TimerDue
from eventlm.policies.lrs import Lrs
from tests.core.rig import MILLISECOND, Rig, arrival

COMPONENTS = {"queue", "sequences", "replicas", "blocks", "timers", "policy", "rng"}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys() == COMPONENTS
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(("fact", "wanted"), [
    (Paused(), {"policy"}),
    (PolicySwapped(name="lrs"), {"policy", "queue"}),
    (CacheFlushed(), {"blocks"}),
    (PredictorSwapped(coefficients=[1, 2, 3, 4, 5]), {"policy"}),
    (arrival(4, 9, offline=True), {"queue", "sequences", "rng"}),
    (arrival(4, 9, deadline_ns=50 * MILLISECOND, drop_if_late=True), {"queue", "sequences", "rng", "timers"}),
])  # fmt: skip
def test_a_digest_changes_with_its_component(fact: Fact, wanted: set[str]) -> None:
    rig = Rig(max_num_seqs=1, others={"lrs": Lrs()})
    rig.arrive(4, 9)
    rig.arrive(4, 9)
    before = rig.core.digests()
    rig.feed(fact)
    assert changed(before, rig.core.digests()) <= wanted
    assert changed(before, rig.core.digests()) >= wanted - {"queue"}


def test_a_step_changes_what_it_touches() -> None:
    rig = Rig()
    rig.arrive(4, 9)
    before = rig.core.digests()
    rig.complete()
    assert changed(before, rig.core.digests()) == {"sequences", "replicas"}
    for _ in range(4):
        rig.complete()
    assert "blocks" in changed(before, rig.core.digests())


def test_how_long_a_step_in_flight_will_take_is_part_of_the_state() -> None:
    """What is planned behind it depends on that."""
    rig = Rig()
    rig.arrive(4, 9)
    before = rig.core.digests()
    steps = rig.state.replicas[0].in_flight
    steps[0] = structs.replace(steps[0], predicted_ns=steps[0].predicted_ns + 1)
    assert changed(before, rig.core.digests()) == {"replicas"}


def test_a_pause_and_its_end_leave_no_trace() -> None:
    rig = Rig()
    before = rig.core.digests()
    rig.feed(Paused())
    rig.feed(Resumed())
    assert rig.core.digests() == before


def test_digests_do_not_depend_on_how_often_they_are_taken() -> None:
    often, once = Rig(), Rig()
    for rig in (often, once):
        rig.arrive(4, 9)
        for _ in range(9):
            rig.complete()
            if rig is often:
                rig.core.digests()
    assert often.core.digests() == once.core.digests()


def test_seeds_are_part_of_the_state() -> None:
    one, two = Rig(), Rig()
    one.arrive(4, 9, seed="1")
    two.arrive(4, 9, seed="2")
    assert changed(one.core.digests(), two.core.digests()) == {"rng"}


def test_timers_of_requests_that_ended_are_cleared_away() -> None:
    rig = Rig()
    lasting = rig.arrive(4, 9, deadline_ns=10**12, drop_if_late=True)
    for _ in range(300):
        seq = rig.arrive(4, 9, deadline_ns=10**11, drop_if_late=True)
        rig.feed(Cancelled(request=seq))
    assert len(rig.state.timers) < 200
    due_ns = rig.now_ns + 10**12
    rig.feed(TimerDue(due_ns=due_ns), at=due_ns)
    assert (lasting, 0, "deadline", 0) in rig.finished()
    assert rig.core.next_timer_ns is None
    assert rig.core.digests()["timers"] == "0" * 16


def test_timers_fire_in_order_of_time_then_request() -> None:
    rig = Rig(up=False)
    late = rig.arrive(4, 9, deadline_ns=9 * MILLISECOND, drop_if_late=True)
    seqs = rig.arrive_all(*(arrival(4, 9, deadline_ns=5 * MILLISECOND, drop_if_late=True) for _ in range(3)))
    rig.feed(TimerDue(due_ns=rig.now_ns + 20 * MILLISECOND), at=rig.now_ns + 20 * MILLISECOND)
    assert [end[0] for end in rig.finished()] == [*seqs, late]
