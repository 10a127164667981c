"""An engine that goes on with the run of one that died: nothing ends but what it dies of again and again."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.config.core import Forwarding
from eventlm.core.recovery import MOST_RECOVERIES
from eventlm.core.state import snapshot
from eventlm.core.state.sequence import State
from eventlm.events import (
    Closing,
    Forwarded,
    Launched,
    Paused,
    Preempted,
    Resumed,
    RetrySet,
    TextEnded,
    TimerDue,
    WorkerUp,
)
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import Rig, arrival, rows
from tests.core.test_forwarding import SECOND, Backends


def test_every_worker_is_lost_at_once_and_the_sequences_go_on_with_what_they_have() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2, max_steps_in_flight=2, max_decodes_in_flight_per_seq=2)
    seqs = rig.arrive_all(*(arrival(4, 6) for _ in range(4)))
    rig.complete(0)
    rig.recover()
    assert {(found.request, found.reason) for found in rig.of(Preempted)} == {(seq, "lost") for seq in seqs}
    assert [replica.worker for replica in rig.state.replicas] == [None, None]
    assert all(replica.pool.num_available == 32 for replica in rig.state.replicas)
    assert sorted(rig.sequence(seq).num_tokens for seq in seqs) == [4, 4, 5, 5]
    rig.start_workers()
    assert {seq for launched in rig.of(Launched) for seq in rows(launched)} == {*seqs}
    rig.finish_all()
    assert sorted(rig.finished()) == [(seq, 0, "length", 6) for seq in seqs]


def test_no_sequence_is_suspected() -> None:
    rig = Rig(max_losses=1)
    rig.arrive(4, 6)
    rig.complete()
    before = repr(rig.state.replicasets[0].losses)
    rig.recover()
    assert rig.state.replicasets[0].suspects == {}
    assert repr(rig.state.replicasets[0].losses) == before


def test_steps_and_workers_of_the_engine_before_mean_nothing() -> None:
    rig = Rig()
    rig.arrive(4, 6)
    late = rig.completion()
    rig.recover()
    rig.feed(late)
    rig.feed(WorkerUp(replica=0, epoch=1))
    assert rig.last == []
    rig.feed(WorkerUp(replica=0, epoch=2))
    assert rig.of(Launched)


def test_recoveries_before_any_worker_is_up_change_nothing() -> None:
    rig = Rig()
    rig.arrive(4, 6)
    rig.recover()
    before = rig.core.digests()
    for _ in range(MOST_RECOVERIES):
        rig.recover()
        assert rig.last == []
    assert rig.core.digests() == before


def test_a_closing_sequence_stays_so_and_a_pause_goes_on() -> None:
    rig = Rig()
    seq = rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    assert rig.of(Closing)
    other = rig.arrive(4, 1)
    rig.feed(Paused())
    rig.recover()
    assert rig.sequence(seq).state is State.CLOSING
    rig.start_workers()
    assert not rig.of(Launched)
    rig.feed(TextEnded(request=seq, index=0, position=1))
    rig.feed(Resumed())
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 1), (other, 0, "length", 1)]


def test_deadlines_run_on() -> None:
    rig = Rig()
    seq = rig.arrive(4, 4, deadline_ns=SECOND, drop_if_late=True)
    due_ns = rig.core.next_timer_ns
    assert due_ns is not None
    rig.recover()
    assert rig.core.next_timer_ns == due_ns
    rig.feed(TimerDue(due_ns=due_ns + SECOND), at=due_ns + SECOND)
    assert rig.finished() == [(seq, 0, "deadline", 0)]


@pytest.mark.parametrize("steps", [0, 2])
def test_one_that_gets_no_token_between_three_recoveries_ends(steps: int) -> None:
    rig = Rig()
    seq = rig.arrive(4, 6)
    for _ in range(steps):
        rig.complete()
    for _ in range(MOST_RECOVERIES - 1):
        rig.recover()
        assert rig.finished() == []
        rig.start_workers()
    rig.recover()
    assert rig.finished() == [(seq, 0, "error", steps)]
    assert rig.state.recoveries == {}


def test_a_token_makes_the_count_begin_anew() -> None:
    rig = Rig()
    seq = rig.arrive(4, 20)
    for _ in range(4):
        for _ in range(MOST_RECOVERIES - 1):
            rig.recover()
            rig.start_workers()
        rig.complete()
    assert rig.finished() == []
    assert rig.sequence(seq).num_output_tokens == 4


def test_one_that_only_waited_is_not_counted() -> None:
    rig = Rig(max_num_seqs=1)
    seqs = rig.arrive_all(arrival(4, 2), arrival(4, 2))
    for _ in range(MOST_RECOVERIES):
        rig.recover()
        rig.start_workers()
    assert rig.finished() == [(seqs[0], 0, "error", 0)]
    rig.finish_all()
    assert rig.finished()[1:] == [(seqs[1], 0, "length", 2)]


def test_one_whose_grammar_kills_the_engine_ends() -> None:
    rig = Rig()
    seq = rig.arrive(4, 2, waits_for_grammar=True)
    for _ in range(MOST_RECOVERIES):
        rig.recover()
    assert rig.finished() == [(seq, 0, "error", 0)]


def test_one_that_closes_is_counted_too() -> None:
    rig = Rig()
    seq = rig.arrive(4, 1, has_text_ends=True)
    rig.complete()
    for _ in range(MOST_RECOVERIES):
        rig.recover()
    assert rig.finished() == [(seq, 0, "error", 1)]


def test_samples_are_counted_apart() -> None:
    rig = Rig()
    seq = rig.arrive(4, 2, n=2)
    for turn in range(MOST_RECOVERIES):
        rig.recover()
        rig.start_workers()
        if not turn:
            rig.complete(produced=[1, 0])
    assert rig.finished() == [(seq, 1, "error", 0)]


def test_the_counts_are_in_snapshot_and_digest() -> None:
    rig = Rig()
    rig.arrive(4, 6)
    assert "recoveries" not in rig.core.digests()
    rig.recover()
    [replicaset] = rig.state.replicasets
    again = snapshot.restore(replicaset.config, replicaset.plugins, rig.core.snapshot())
    assert again.recoveries == rig.state.recoveries
    assert again.digests() == rig.core.digests()
    assert snapshot.take(again) == rig.core.snapshot()


def test_requests_at_other_servers_wait_and_are_sent_again_without_blame() -> None:
    rig = Backends(limit=2)
    first, second = (rig.arrive(8, 8) for _ in range(2))
    rig.stream(first, 3)
    balance_ppm = _forwards(rig).balance_ppm
    rig.recover()
    assert [(each.request, each.attempt, each.due_ns) for each in rig.of(RetrySet)] == [
        (first, 1, rig.now_ns),
        (second, 1, rig.now_ns),
    ]
    assert not any(replica.up or replica.num_sent for replica in rig.state.replicas)
    assert _forwards(rig).balance_ppm == balance_ppm
    # The servers before it are not the servers of this engine until it has asked them.
    rig.feed(rig.up(0), rig.up(1))
    assert not rig.of(Forwarded)
    rig.feed(rig.up(0, epoch=2, limit=2), rig.up(1, epoch=2, limit=2))
    assert sorted((each.request, each.attempt) for each in rig.of(Forwarded)) == [(first, 2), (second, 2)]
    rig.stream(first, 5)
    rig.end(first, 5)
    rig.end(second, 4)
    assert rig.finished() == [(first, 0, "stop", 5), (second, 0, "stop", 4)]


def test_an_answer_that_no_server_can_go_on_with_ends() -> None:
    rig = Backends(1)
    seq = rig.arrive(8, 8)
    rig.stream(seq, 3)
    rig.recover()
    rig.feed(rig.up(0, epoch=2))
    rig.fail(seq, "refused")
    assert rig.finished() == [(seq, 0, "error", 3)]


def test_lost_attempts_are_none_of_those_that_may_fail() -> None:
    rig = Backends(1, forwards=Forwarding(max_attempts=2, backoff_ns=SECOND))
    seq = rig.arrive(8, 8)
    rig.recover()
    rig.feed(rig.up(0, epoch=2))
    rig.fail(seq)
    # The first that failed, so the wait is that after a first one.
    assert rig.of(RetrySet)[0].due_ns <= rig.now_ns + SECOND
    rig.wait()
    rig.fail(seq)
    assert rig.finished() == [(seq, 0, "error", 0)]


def test_a_second_attempt_is_lost_with_the_first() -> None:
    rig = Backends(2, forwards=Forwarding(hedge_ns=SECOND // 2))
    seq = rig.arrive(8, 8, deadline_ns=SECOND)
    rig.wait()
    assert len(rig.under_way) == 2
    rig.recover()
    assert [each.attempt for each in rig.of(RetrySet)] == [2]
    assert not any(replica.num_sent for replica in rig.state.replicas)
    rig.feed(rig.up(0, epoch=2), rig.up(1, epoch=2))
    assert [each.attempt for each in rig.of(Forwarded)] == [3]
    rig.end(seq)
    assert rig.finished() == [(seq, 0, "stop", 4)]


def test_one_that_rests_after_a_failure_rests_on() -> None:
    rig = Backends(1)
    seq = rig.arrive(8, 8)
    rig.fail(seq)
    due_ns = rig.of(RetrySet)[0].due_ns
    rig.recover()
    assert rig.core.next_timer_ns == due_ns
    rig.feed(rig.up(0, epoch=2))
    assert not rig.of(Forwarded)
    rig.wait()
    assert rig.of(Forwarded)


def test_all_replicasets_lose_theirs() -> None:
    rig = Rig(sets=[{"num_replicas": 2}])
    seqs = rig.arrive_all(arrival(4, 2), arrival(4, 2, replicaset=1))
    rig.recover()
    assert not any(replica.up for replica in rig.state.replicas)
    rig.start_workers()
    rig.finish_all()
    assert sorted(rig.finished()) == [(seq, 0, "length", 2) for seq in seqs]


def _forwards(rig: Backends) -> Any:
    return rig.state.replicasets[0].forwards
