"""Several replicas: lost workers, late messages of older ones, other policies."""

from __future__ import annotations

import pytest

from eventlm.core.state.sequence import State
from eventlm.errors import InvariantError
from eventlm.events import (
    Desynced,
    Launched,
    PolicySwapped,
    PredictorSwapped,
    Preempted,
    WorkerLost,
    WorkerUp,
)
from eventlm.policies.edf import Edf
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.lrs import Lrs
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import MILLISECOND, Rig, arrival, rows


def test_a_lost_workers_sequences_go_on_elsewhere_with_what_they_have() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2)
    seq, other = rig.arrive_all(arrival(4, 6), arrival(4, 6))
    rig.complete(0)
    rig.complete(0)
    rig.lose(0)
    assert [(found.request, found.reason) for found in rig.of(Preempted)] == [(seq, "lost")]
    assert rig.routed()[-1] == (seq, -1, 1)
    # The step in flight went with the worker, the two confirmed tokens did not.
    assert rig.sequence(seq).num_tokens == 6
    assert (rig.sequence(seq).in_flight, rig.sequence(seq).pending_tokens) == (0, 0)
    rig.complete(1)
    launched = rig.of(Launched)[0]
    assert launched.chunks == [(seq, 0, 0, 6, 1)]
    rig.finish_all()
    assert sorted(rig.finished()) == [(seq, 0, "length", 6), (other, 0, "length", 6)]


def test_the_only_replica_takes_its_sequences_back_when_it_returns() -> None:
    rig = Rig()
    seqs = rig.arrive_all(arrival(4, 6), arrival(4, 6), arrival(4, 6))
    rig.complete()
    rig.lose()
    assert rig.state.replicas[0].pool.num_available == 32
    assert all(rig.sequence(seq).state is State.WAITING for seq in seqs)
    rig.feed(WorkerUp(replica=0, epoch=2))
    launched = rig.of(Launched)[0]
    assert (launched.epoch, rows(launched), launched.forget) == (2, seqs, [])
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 6) for seq in seqs]


def test_a_sequence_preempted_with_a_step_in_flight_survives_the_loss_of_its_worker() -> None:
    rig = Rig(max_num_seqs=1, max_steps_in_flight=2, num_replicas=2)
    rig.lose(1)
    victim = rig.arrive(4, 6)
    rig.complete()
    urgent = rig.arrive(4, 2, priority=-1)
    assert rig.sequence(victim).in_flight == 1
    rig.lose()
    assert rig.sequence(victim).in_flight == 0
    rig.feed(WorkerUp(replica=1, epoch=2))
    rig.finish_all()
    assert {end[0] for end in rig.finished()} == {victim, urgent}


def test_a_desync_is_a_loss() -> None:
    rig = Rig()
    seq = rig.arrive(4, 6)
    rig.flying[0].clear()
    rig.feed(Desynced(replica=0, epoch=1, step=0))
    assert rig.preempted() == [(seq, "lost")]
    # The loss that follows it says nothing new.
    rig.feed(WorkerLost(replica=0, epoch=1))
    assert rig.last == []
    rig.feed(WorkerUp(replica=0, epoch=2))
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 6)]


def test_late_news_of_an_older_worker_are_no_ops() -> None:
    rig = Rig()
    rig.feed(WorkerUp(replica=0, epoch=5))
    rig.arrive(4, 6)
    before = rig.core.digests()
    for epoch in range(5):
        rig.feed(WorkerUp(replica=0, epoch=epoch), WorkerLost(replica=0, epoch=epoch))
        rig.feed(Desynced(replica=0, epoch=epoch, step=3))
        assert rig.last == []
    assert rig.core.digests() == before


def test_a_worker_whose_loss_came_first_does_not_come_up() -> None:
    rig = Rig(up=False)
    rig.arrive(4, 6)
    rig.feed(WorkerLost(replica=0, epoch=3))
    rig.feed(WorkerUp(replica=0, epoch=3))
    assert not rig.of(Launched)
    rig.feed(WorkerUp(replica=0, epoch=4))
    assert rig.of(Launched)


def test_a_new_worker_without_news_of_the_old_ones_loss_replaces_it() -> None:
    rig = Rig()
    seq = rig.arrive(4, 6)
    rig.flying[0].clear()
    rig.feed(WorkerUp(replica=0, epoch=2))
    assert rig.preempted() == [(seq, "lost")]
    assert rig.of(Launched)[0].epoch == 2
    rig.finish_all()
    assert rig.finished() == [(seq, 0, "length", 6)]


@pytest.mark.parametrize("replica", [-1, 2])
def test_a_replica_that_there_is_not_is_refused(replica: int) -> None:
    for fact in (WorkerUp(replica=replica, epoch=2), WorkerLost(replica=replica, epoch=2)):
        with pytest.raises(InvariantError, match="there is no replica"):
            Rig(num_replicas=2).feed(fact)


def test_another_policy_orders_all_that_wait() -> None:
    rig = Rig(policy=Fcfs(), others={"edf": Edf(), "lrs": Lrs()}, max_num_seqs=1)
    rig.arrive(4, 1)
    patient = rig.arrive(4, 1, deadline_ns=9000 * MILLISECOND)
    hurried = rig.arrive(4, 1, deadline_ns=1000 * MILLISECOND)
    rig.feed(PolicySwapped(name="edf"))
    rig.complete()
    assert rows(rig.of(Launched)[0]) == [hurried]
    rig.feed(PolicySwapped(name="lrs"))
    rig.feed(PolicySwapped(name="first"))
    rig.complete()
    assert rows(rig.of(Launched)[0]) == [patient]
    rig.finish_all()
    assert len(rig.finished()) == 3


def test_a_policy_that_was_not_installed_is_refused() -> None:
    with pytest.raises(InvariantError, match="'nobody' was not installed"):
        Rig().feed(PolicySwapped(name="nobody"))


def test_new_coefficients_change_the_times_of_all_that_wait() -> None:
    rig = Rig(max_num_seqs=1)
    rig.arrive(4, 9)
    waiting = rig.arrive(20, 9)
    rig.feed(PredictorSwapped(coefficients=[1000, 2000, 0, 0, 0]))
    assert rig.sequence(waiting).view.prefill_ns == 1 + 2 * 20
    assert rig.sequence(waiting).view.remaining_ns == 1 + 2 * 20
    with pytest.raises(InvariantError, match="5 non-negative"):
        rig.feed(PredictorSwapped(coefficients=[1]))


def test_a_replica_names_the_worker_that_counts() -> None:
    rig = Rig(up=False)
    replica = rig.state.replicas[0]
    workers = []
    for fact in (
        WorkerUp(replica=0, epoch=2),
        WorkerLost(replica=0, epoch=1),
        WorkerUp(replica=0, epoch=1),
        Desynced(replica=0, epoch=2, step=0),
        WorkerUp(replica=0, epoch=3),
        WorkerLost(replica=0, epoch=5),
        WorkerUp(replica=0, epoch=4),
        WorkerUp(replica=0, epoch=6),
    ):
        rig.feed(fact)
        workers.append(replica.worker)
    # The loss of a worker that never came up is remembered.
    assert workers == [2, 2, 2, None, 3, None, None, 6]
