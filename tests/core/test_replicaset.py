"""Several replicas: routes, turns, lost workers, late news of older ones, other policies."""

from __future__ import annotations

import pytest

from eventlm.core.replicaset import view_of
from eventlm.core.sequence import State
from eventlm.errors import InvariantError
from eventlm.events import (
    Desynced,
    Launched,
    PolicySwapped,
    PredictorSwapped,
    Preempted,
    Routed,
    WorkerLost,
    WorkerUp,
)
from eventlm.policies.edf import Edf
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.least_loaded import LeastLoaded
from eventlm.policies.lrs import Lrs
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import MILLISECOND, Rig, arrival, rows


def homes(rig: Rig) -> list[tuple[int, int, int]]:
    return [(found.request, found.index, found.replica) for found in rig.decisions if isinstance(found, Routed)]


def test_round_robin_routes_requests_in_turn_all_samples_together() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2)
    seqs = rig.arrive_all(arrival(n=2), arrival(), arrival())
    assert homes(rig) == [(seqs[0], -1, 0), (seqs[1], -1, 1), (seqs[2], -1, 0)]
    assert {found.replica: rows(found) for found in rig.of(Launched)} == {
        0: [seqs[0], seqs[0], seqs[2]],
        1: [seqs[1]],
    }


def test_least_loaded_sees_what_it_routed_before() -> None:
    rig = Rig(router=LeastLoaded(), num_replicas=2)
    seqs = rig.arrive_all(arrival(20), arrival(4), arrival(4), arrival(4))
    assert [replica for _, _, replica in homes(rig)] == [0, 1, 1, 1]
    assert len(seqs) == 4


def test_with_one_queue_the_replica_with_fewest_tokens_takes_first() -> None:
    rig = Rig(num_replicas=2, max_steps_in_flight=3)
    seqs = [rig.arrive(20, 9), rig.arrive(4, 9), rig.arrive(4, 9), rig.arrive(30, 9)]
    taken = {
        chunk[0]: found.replica for found in rig.decisions if isinstance(found, Launched) for chunk in found.chunks
    }
    assert [taken[seq] for seq in seqs] == [0, 1, 1, 1]
    assert homes(rig) == []


def test_nothing_is_routed_or_launched_before_a_worker_is_up() -> None:
    rig = Rig(router=RoundRobin(), up=False, num_replicas=2)
    seqs = rig.arrive_all(arrival(), arrival())
    assert homes(rig) == []
    rig.feed(WorkerUp(replica=1, epoch=1))
    assert homes(rig) == [(seqs[0], -1, 1), (seqs[1], -1, 1)]
    assert rows(rig.of(Launched)[0]) == seqs


def test_a_lost_workers_sequences_go_on_elsewhere_with_what_they_have() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2)
    seq, other = rig.arrive_all(arrival(4, 6), arrival(4, 6))
    rig.complete(0)
    rig.complete(0)
    rig.lose(0)
    assert [(found.request, found.reason) for found in rig.of(Preempted)] == [(seq, "lost")]
    assert homes(rig)[-1] == (seq, -1, 1)
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


def test_prefix_affinity_sees_what_is_cached_what_waits_and_what_is_half_done() -> None:
    rig = Rig(router=PrefixAffinity(), num_replicas=2, max_num_seqs=1, max_num_batched_tokens=4)
    mine, other = list(range(1, 6)), list(range(11, 16))
    seqs = rig.arrive_all(*(arrival(20, 2, blocks=names) for names in (mine, other, other, mine)))
    # The second of each finds its prefix in a replica that has not computed a token of it.
    assert [replica for _, _, replica in homes(rig)] == [0, 1, 1, 0]
    rig.complete(0)
    half_done = rig.sequence(seqs[0])
    assert (half_done.state, half_done.launched_tokens) == (State.PREFILL, 8)
    assert [replica.prefix_tokens(half_done, 4) for replica in rig.state.replicas] == [16, 0]
    rig.finish_all()
    late = rig.arrive(24, 2, blocks=[*other, 16])
    assert homes(rig)[-1] == (late, -1, 1)
    assert rig.sequence(late).cached_tokens == 20
    rig.finish_all()
    assert [replica.queue.names for replica in rig.state.replicas] == [{}, {}]


def test_a_lost_worker_has_no_prefix_and_gets_none_routed() -> None:
    rig = Rig(router=PrefixAffinity(), num_replicas=2)
    names = list(range(1, 6))
    rig.arrive_all(arrival(20, 4, blocks=names), arrival(20, 4, blocks=names))
    assert [replica for _, _, replica in homes(rig)] == [0, 0]
    rig.lose(0)
    assert [replica for _, _, replica in homes(rig)][2:] == [1, 1]
    assert rig.state.replicas[0].queue.names == {}
    rig.feed(WorkerUp(replica=0, epoch=2))
    rig.arrive(20, 4, blocks=names)
    assert homes(rig)[-1][2] == 1
    rig.finish_all()


def test_prefixes_are_looked_up_for_those_who_read_them_only() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2, max_num_seqs=1)
    seqs = [rig.arrive(20, 2, blocks=[1, 2, 3, 4, 5]) for _ in range(4)]
    assert [len(replica.queue) for replica in rig.state.replicas] == [1, 1]
    assert [replica.queue.names for replica in rig.state.replicas] == [{}, {}]
    assert view_of(rig.state, rig.state.replicas[0], rig.sequence(seqs[0])).prefix_tokens == 0


def test_one_that_gives_way_goes_on_at_a_replica_whose_turn_was_over() -> None:
    depth = {"max_steps_in_flight": 2, "max_decodes_in_flight_per_seq": 2}
    rig = Rig(up=False, num_replicas=2, num_blocks=5, max_model_len=16, **depth)
    rig.feed(WorkerUp(replica=0, epoch=1))
    ahead, behind = rig.arrive_all(arrival(4, 6), arrival(4, 12))
    rig.feed(WorkerUp(replica=1, epoch=1))
    while not rig.preempted():
        rig.complete()
    assert rig.preempted() == [(behind, "memory")]
    # The last row of `ahead` is in flight, with the block that `behind` lacks: replica 0 has nothing to launch.
    assert rig.sequence(ahead).in_flight == 1
    assert [(launched.replica, rows(launched)) for launched in rig.of(Launched)] == [(1, [behind])] * 2
    rig.finish_all()
    assert [reason for *_, reason, _ in rig.finished()] == ["length", "length"]


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
