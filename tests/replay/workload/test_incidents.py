from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.events import Fact, Paused, PolicySwapped, Resumed, WorkerLost, WorkerUp
from eventlm.replay.workload.incidents import for_engine, sped_up


def test_a_replica_has_a_worker_from_the_start_unless_its_incidents_begin_with_one() -> None:
    lost = WorkerLost(ts=5, replica=0, epoch=1)
    late = WorkerUp(ts=9, replica=1, epoch=3)
    found = for_engine([lost, late], num_replicas=3, policies=["fcfs"])
    assert found == [WorkerUp(replica=0, epoch=1), WorkerUp(replica=2, epoch=1), lost, late]
    # Replicas that the engine does not have.
    assert for_engine([lost, late], num_replicas=1, policies=["fcfs"]) == [WorkerUp(replica=0, epoch=1), lost]


def test_a_swap_needs_its_policy() -> None:
    swap = PolicySwapped(ts=2_500_000_000, name="lrs")
    assert for_engine([swap], num_replicas=1, policies=["fcfs", "lrs"])[-1] == swap
    with pytest.raises(UsageError, match=r"policy lrs at 2\.5 s.*--extra-policy lrs"):
        for_engine([swap], num_replicas=1, policies=["fcfs"])


def test_outages_last_as_long_in_a_faster_load() -> None:
    incidents: list[Fact] = [
        WorkerUp(ts=10, replica=0, epoch=1),
        WorkerLost(ts=300, replica=0, epoch=1),
        Paused(ts=310),
        WorkerUp(ts=400, replica=0, epoch=2),
        Resumed(ts=320),
    ]
    found = sped_up(incidents, first_ns=100, factor_ppm=2_000_000)
    assert [(type(fact), fact.ts) for fact in found] == [
        (WorkerUp, 10),
        (WorkerLost, 200),
        (Paused, 205),
        (Resumed, 215),
        (WorkerUp, 300),
    ]
