"""Several replicasets in one core share its log, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.snapshot import restore, take
from eventlm.errors import InvariantError
from eventlm.events import (
    CacheFlushed,
    Fact,
    Launched,
    PolicySwapped,
    PredictorSwapped,
    Rejected,
    WorkerLost,
    WorkerUp,
)
from eventlm.policies.lrs import Lrs
from eventlm.policies.round_robin import RoundRobin
from tests.core.rig import Rig, arrival, group

SMALL = {"num_blocks": 9, "max_model_len": 32, "max_num_seqs": 1, "max_queue_len": 1, "block_size": 2}


def replicas_of(rig: Rig) -> list[int]:
    return [launched.replica for launched in rig.of(Launched)]


def test_a_request_runs_on_the_replicas_of_its_set_alone() -> None:
    rig = Rig(router=RoundRobin(), num_replicas=2, sets=[{"num_replicas": 2}, SMALL])
    assert [(each.first, len(each.replicas)) for each in rig.state.replicasets] == [(0, 2), (2, 2), (4, 1)]
    rig.arrive_all(arrival(), arrival(replicaset=1), arrival(replicaset=1), arrival(replicaset=2))
    assert replicas_of(rig) == [0, 2, 3, 4]
    rig.finish_all()
    assert len(rig.finished()) == 4


def test_limits_and_queues_are_each_sets_own() -> None:
    rig = Rig(sets=[SMALL])
    rig.arrive(replicaset=1)
    rig.arrive(replicaset=1)
    assert [each.num_waiting for each in rig.state.replicasets] == [0, 1]
    refused = rig.feed(arrival(replicaset=1))
    assert [each.reason for each in refused if isinstance(each, Rejected)] == ["queue_full"]
    refused = rig.feed(arrival(30, 4, replicaset=1))
    assert [each.reason for each in refused if isinstance(each, Rejected)] == ["context_length"]
    rig.arrive(30, 4)
    assert replicas_of(rig) == [0]
    rig.finish_all()


def test_a_set_without_a_worker_waits_while_the_others_go_on() -> None:
    rig = Rig(sets=[{}], up=False)
    rig.feed(WorkerUp(replica=0, epoch=1))
    rig.arrive_all(arrival(), arrival(replicaset=1))
    assert replicas_of(rig) == [0]
    rig.finish_all()
    assert rig.state.num_waiting == 1
    rig.feed(WorkerUp(replica=1, epoch=1))
    assert replicas_of(rig) == [1]
    rig.flying[1].clear()
    rig.feed(WorkerLost(replica=1, epoch=1))
    assert [len(each.unrouted) for each in rig.state.replicasets] == [0, 1]


def test_losses_of_one_set_say_nothing_of_the_workers_of_another() -> None:
    rig = Rig(sets=[{}], max_losses=3)
    rig.arrive_all(arrival(max_tokens=8), arrival(max_tokens=8, replicaset=1))
    rig.lose(1)
    assert [each.losses.in_a_row for each in rig.state.replicasets] == [0, 1]
    rig.complete(0)
    assert [each.losses.in_a_row for each in rig.state.replicasets] == [0, 1]


def test_a_swap_or_a_flush_is_of_one_set_or_of_all() -> None:
    rig = Rig(sets=[{}], others={"lrs": Lrs()})
    rig.feed(PolicySwapped(name="lrs", replicaset=1))
    assert [each.policy_name for each in rig.state.replicasets] == ["first", "lrs"]
    assert rig.state.policy_name == "first, lrs"
    rig.feed(PolicySwapped(name="lrs"))
    assert [each.policy_generation for each in rig.state.replicasets] == [1, 2]
    rig.feed(PredictorSwapped(coefficients=[7, 0, 0, 0, 0]))
    assert [each.predictor == Predictor(7) for each in rig.state.replicasets] == [True, False]
    rig.arrive_all(arrival(8, 1, blocks=[1, 2]), arrival(8, 1, blocks=[1, 2], replicaset=1))
    rig.finish_all()
    rig.feed(CacheFlushed(replicaset=1))
    assert [replica.pool.num_idle for replica in rig.state.replicas] == [2, 0]
    rig.feed(CacheFlushed())
    assert [replica.pool.num_idle for replica in rig.state.replicas] == [0, 0]


@pytest.mark.parametrize(
    "fact", [arrival(replicaset=2), arrival(replicaset=-1), PolicySwapped(name="first", replicaset=2)]
)
def test_a_fact_about_a_set_that_is_not_there_is_refused(fact: Fact) -> None:
    with pytest.raises(InvariantError, match="replicaset"):
        Rig(sets=[{}]).feed(fact)


def test_a_group_is_for_one_set() -> None:
    with pytest.raises(InvariantError, match="its group for 0"):
        Rig(sets=[{}]).feed(*group(arrival(), arrival(replicaset=1)))


def test_a_snapshot_has_all_sets() -> None:
    rig = Rig(num_replicas=2, sets=[SMALL], others={"lrs": Lrs()})
    rig.arrive_all(arrival(), arrival(replicaset=1))
    rig.feed(PolicySwapped(name="lrs", replicaset=1), arrival(replicaset=1))
    first, other = rig.state.replicasets
    taken = take(rig.state)
    parts = SetParts(other.config, other.plugins, Predictor(1))
    copy = restore(first.config, first.plugins, taken, [parts])
    assert take(copy) == taken
    assert copy.digests() == rig.core.digests()
    assert copy.replicasets[1].predictor == other.predictor
    for others in ([], [parts, parts]):
        with pytest.raises(InvariantError, match="it has"):
            restore(first.config, first.plugins, taken, others)
    assert "others" not in msgspec.json.decode(take(Rig().state))
