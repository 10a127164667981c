"""Who gets a sequence: what routers see, and when they are asked."""

from __future__ import annotations

from eventlm.core.routing import UpReplicas
from eventlm.core.state.sequence import State
from eventlm.events import (
    Launched,
    WorkerUp,
)
from eventlm.policies.least_loaded import LeastLoaded
from eventlm.policies.prefix_affinity import PrefixAffinity
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import Rig, arrival, rows


def test_round_robin_routes_requests_in_turn_all_samples_together() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2)
    seqs = rig.arrive_all(arrival(n=2), arrival(), arrival())
    assert rig.routed() == [(seqs[0], -1, 0), (seqs[1], -1, 1), (seqs[2], -1, 0)]
    assert {found.replica: rows(found) for found in rig.of(Launched)} == {
        0: [seqs[0], seqs[0], seqs[2]],
        1: [seqs[1]],
    }


def test_least_loaded_sees_what_it_routed_before() -> None:
    rig = Rig(router=LeastLoaded(), num_replicas=2)
    seqs = rig.arrive_all(arrival(20), arrival(4), arrival(4), arrival(4))
    assert [replica for _, _, replica in rig.routed()] == [0, 1, 1, 1]
    assert len(seqs) == 4


def test_nothing_is_routed_or_launched_before_a_worker_is_up() -> None:
    rig = Rig(router=RoundRobin(), up=False, num_replicas=2)
    seqs = rig.arrive_all(arrival(), arrival())
    assert rig.routed() == []
    rig.feed(WorkerUp(replica=1, epoch=1))
    assert rig.routed() == [(seqs[0], -1, 1), (seqs[1], -1, 1)]
    assert rows(rig.of(Launched)[0]) == seqs


def test_prefix_affinity_sees_what_is_cached_what_waits_and_what_is_half_done() -> None:
    rig = Rig(router=PrefixAffinity(), num_replicas=2, max_num_seqs=1, max_num_batched_tokens=4)
    mine, other = list(range(1, 6)), list(range(11, 16))
    seqs = rig.arrive_all(*(arrival(20, 2, blocks=names) for names in (mine, other, other, mine)))
    # The second of each finds its prefix in a replica that has not computed a token of it.
    assert [replica for _, _, replica in rig.routed()] == [0, 1, 1, 0]
    rig.complete(0)
    half_done = rig.sequence(seqs[0])
    assert (half_done.state, half_done.launched_tokens) == (State.PREFILL, 8)
    assert [replica.prefix_tokens(half_done, 4) for replica in rig.state.replicas] == [16, 0]
    rig.finish_all()
    late = rig.arrive(24, 2, blocks=[*other, 16])
    assert rig.routed()[-1] == (late, -1, 1)
    assert rig.sequence(late).cached_tokens == 20
    rig.finish_all()
    assert [replica.awaited for replica in rig.state.replicas] == [{}, {}]


def test_a_lost_worker_has_no_prefix_and_gets_none_routed() -> None:
    rig = Rig(router=PrefixAffinity(), num_replicas=2)
    names = list(range(1, 6))
    rig.arrive_all(arrival(20, 4, blocks=names), arrival(20, 4, blocks=names))
    assert [replica for _, _, replica in rig.routed()] == [0, 0]
    rig.lose(0)
    assert [replica for _, _, replica in rig.routed()][2:] == [1, 1]
    assert rig.state.replicas[0].awaited == {}
    rig.feed(WorkerUp(replica=0, epoch=2))
    rig.arrive(20, 4, blocks=names)
    assert rig.routed()[-1][2] == 1
    rig.finish_all()


def test_prefixes_are_looked_up_only_for_plugins_that_read_them() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2, max_num_seqs=1)
    seqs = [rig.arrive(20, 2, blocks=[1, 2, 3, 4, 5]) for _ in range(4)]
    assert [len(replica.queue) for replica in rig.state.replicas] == [1, 1]
    assert [replica.awaited for replica in rig.state.replicas] == [{}, {}]
    assert UpReplicas(rig.state.replicasets[0], rig.sequence(seqs[0]))[0].prefix_tokens == 0
