"""The door: order of events, drains, pauses, causes; the same facts always lead to the same decisions."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.core.state.sequence import State
from eventlm.errors import InvariantError
from eventlm.events import (
    Admitted,
    CacheFlushed,
    Checkpoint,
    Emitted,
    Finished,
    Launched,
    Paused,
    Resumed,
    TimerSet,
    UserMark,
    WorkerUp,
)
from tests.core.rig import MILLISECOND, Rig, arrival


@pytest.mark.parametrize("change", [{"s": 1}, {"s": 4}, {"ts": MILLISECOND}, {"ts": 5}, {"c": 9}, {"c": -1}, {"p": 2},
                                    {"ts": 2**63}])  # fmt: skip
def test_facts_out_of_place_are_refused(change: dict[str, Any]) -> None:
    rig = Rig()
    fact = arrival(s=rig.core.next_seq, ts=2 * MILLISECOND, p=1)
    with pytest.raises(InvariantError, match="event"):
        rig.core.apply(structs.replace(fact, **change))


def test_facts_of_a_drain_share_their_time() -> None:
    rig = Rig()
    rig.core.apply(arrival(s=rig.core.next_seq, ts=2 * MILLISECOND))
    with pytest.raises(InvariantError, match="inside the drain"):
        rig.core.apply(arrival(s=rig.core.next_seq, ts=2 * MILLISECOND + 1, p=1))


def test_markers_stand_between_drains_and_change_nothing() -> None:
    rig = Rig()
    before = rig.core.digests()
    s = rig.core.next_seq
    assert rig.core.apply(UserMark(s=s, ts=rig.now_ns, c=s - 1, text="here")) == []
    assert rig.core.apply(Checkpoint(s=s + 1, ts=rig.now_ns, c=s, digests=before)) == []
    assert rig.core.digests() == before
    assert rig.core.next_seq == s + 2
    rig.core.apply(arrival(s=s + 2, ts=9 * MILLISECOND))
    with pytest.raises(InvariantError):
        rig.core.apply(UserMark(s=rig.core.next_seq, ts=9 * MILLISECOND, text="in a drain"))


def test_plans_are_made_at_the_mark_alone() -> None:
    # 32 requests that arrive in one tick form one batch.
    rig = Rig(max_num_seqs=32, num_blocks=200)
    rig.feed(*(arrival(1, 2) for _ in range(32)))
    (launched,) = rig.of(Launched)
    assert len(launched.chunks) == 32
    assert [type(found) for found in rig.last] == [Admitted] * 32 + [Launched]


def test_decisions_carry_their_cause_and_the_time_of_the_drain() -> None:
    rig = Rig()
    rig.feed(arrival(), arrival())
    first, second = (found.s - 1 for found in rig.of(Admitted))
    assert [found.c for found in rig.of(Admitted)] == [first, second]
    assert rig.of(Launched)[0].c == second
    assert {found.ts for found in rig.last} == {rig.now_ns}
    assert [found.s for found in rig.decisions] == sorted(found.s for found in rig.decisions)


def test_a_flush_leaves_nothing_to_hit_but_what_is_held() -> None:
    rig = Rig(block_size=4)
    rig.arrive(13, 2, blocks=[1, 2, 3])
    rig.finish_all()
    held = rig.arrive(13, 20, blocks=[4, 5, 6])
    rig.feed(CacheFlushed())
    rig.complete()
    again = [rig.arrive(13, 2, blocks=blocks) for blocks in ([1, 2, 3], [4, 5, 6])]
    rig.finish_all()
    cached = {event.request: event.cached_tokens for event in rig.decisions if isinstance(event, Finished)}
    assert [cached[seq] for seq in again] == [0, 12]
    assert cached[held] == 0


def test_a_pause_stops_launches_and_lets_steps_complete() -> None:
    rig = Rig()
    seq = rig.arrive(4, 6)
    rig.feed(Paused())
    rig.complete()
    assert rig.of(Emitted)
    assert not rig.of(Launched)
    late = rig.arrive(4, 6)
    assert rig.sequence(late).state is State.WAITING
    rig.feed(Paused())
    rig.feed(Resumed())
    assert {row[0] for row in rig.of(Launched)[0].chunks} == {late}
    assert {row[0] for row in rig.of(Launched)[0].decodes} == {seq}
    rig.finish_all()
    assert len(rig.finished()) == 2


def test_a_worker_that_comes_up_during_a_pause_waits_for_its_end() -> None:
    rig = Rig(up=False)
    rig.feed(Paused())
    rig.arrive()
    rig.feed(WorkerUp(replica=0, epoch=1))
    assert not rig.of(Launched)
    rig.feed(Resumed())
    assert rig.of(Launched)


def test_two_cores_with_the_same_facts_are_the_same() -> None:
    def run() -> tuple[list[object], dict[str, str]]:
        rig = Rig(num_blocks=9, max_model_len=32, num_replicas=2)
        rig.arrive_all(*(arrival(index % 5 + 1, index % 7 + 1, n=1 + index % 2) for index in range(9)))
        rig.complete(0)
        rig.lose(1)
        rig.feed(WorkerUp(replica=1, epoch=2))
        rig.finish_all()
        return list(rig.decisions), rig.core.digests()

    assert run() == run()


def test_the_next_timer_is_the_earliest() -> None:
    rig = Rig(up=False)
    assert rig.core.next_timer_ns is None
    rig.arrive(4, 9, deadline_ns=50 * MILLISECOND, drop_if_late=True)
    rig.arrive(4, 9, deadline_ns=5 * MILLISECOND, drop_if_late=True)
    assert rig.core.next_timer_ns == rig.of(TimerSet)[0].due_ns < rig.now_ns + 5 * MILLISECOND
