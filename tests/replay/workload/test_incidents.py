from __future__ import annotations

from collections.abc import Sequence

import pytest

from eventlm.config import CoreConfig
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.events import (
    BackendDown,
    BackendUp,
    CacheFlushed,
    Fact,
    Paused,
    PolicySwapped,
    Recovered,
    Resumed,
    WorkerLost,
    WorkerUp,
)
from eventlm.replay.workload.incidents import for_engine, renumbered, sped_up


def parts(num_replicas: int, *policies: str) -> SetParts:
    """A replicaset with these policies."""
    plugins = Plugins(
        policies={name: resolve("policy", {"type": name}).instance for name in ("fcfs", *policies)},
        policy="fcfs",
        batcher=resolve("batcher", {"type": "fixed"}).instance,
        router=resolve("router", {"type": "pull"}).instance,
    )
    config = CoreConfig(models=["m"], num_blocks=8, max_model_len=100, num_replicas=num_replicas)
    return SetParts(config, plugins, Predictor.from_coefficients([1] * 5))


def placed(*incidents: Fact, sets: Sequence[SetParts]) -> list[Fact]:
    """What befalls an engine with these sets."""
    return for_engine(incidents, sets)


def test_a_replica_has_a_worker_from_the_start_unless_its_incidents_begin_with_one() -> None:
    lost = WorkerLost(ts=5, replica=0, epoch=1)
    late = WorkerUp(ts=9, replica=1, epoch=3)
    found = placed(lost, late, sets=[parts(3)])
    assert found == [WorkerUp(replica=0, epoch=1), WorkerUp(replica=2, epoch=1), lost, late]
    # Replicas that the engine does not have.
    assert placed(lost, late, sets=[parts(1)]) == [WorkerUp(replica=0, epoch=1), lost]


def test_a_replica_without_incidents_has_another_worker_after_a_recovery() -> None:
    died, up = Recovered(ts=5), WorkerUp(ts=9, replica=0, epoch=2)
    begin = WorkerUp(replica=0, epoch=1)
    found = placed(begin, died, up, sets=[parts(2)])
    assert found == [WorkerUp(replica=1, epoch=1), begin, died, WorkerUp(ts=5, replica=1, epoch=2), up]
    server = BackendUp(replica=0, epoch=1, name="a:1")
    assert for_engine([died], [parts(1)], {0: server}) == [
        server,
        died,
        BackendUp(ts=5, replica=0, epoch=2, name="a:1"),
    ]


def test_a_swap_needs_its_policy() -> None:
    swap = PolicySwapped(ts=2_500_000_000, name="lrs")
    assert placed(swap, sets=[parts(1, "lrs")])[-1] == swap
    with pytest.raises(UsageError, match=r"policy lrs at 2\.5 s.*--extra-policy lrs"):
        placed(swap, sets=[parts(1)])
    # Of two replicasets, where it swaps.
    of_second = PolicySwapped(ts=2_500_000_000, name="lrs", replicaset=1)
    assert placed(of_second, sets=[parts(1), parts(1, "lrs")])[-1] == of_second
    for fact, second in ((swap, "lrs"), (of_second, "edf"), (PolicySwapped(name="lrs", replicaset=2), "lrs")):
        with pytest.raises(UsageError, match="policy lrs"):
            placed(fact, sets=[parts(1), parts(1, second)])


def test_replicas_and_sets_have_the_numbers_of_the_other_engine() -> None:
    before, here = {"a": 2, "b": 2, "c": 1}, {"c": 2, "a": 1, "d": 1}
    facts: list[Fact] = [WorkerLost(ts=number, replica=number, epoch=1) for number in range(5)]
    found = renumbered(facts, before, here)
    # The second of a, and b, are not there.
    assert [(fact.ts, fact.replica) for fact in found if isinstance(fact, WorkerLost)] == [(0, 2), (4, 0)]
    of_sets: list[Fact] = [CacheFlushed(replicaset=number) for number in (-1, 0, 1, 2)]
    found = renumbered([*of_sets, PolicySwapped(name="lrs"), Paused()], before, here)
    assert [fact.replicaset for fact in found if isinstance(fact, CacheFlushed)] == [-1, 1, 0]
    assert found[3:] == [PolicySwapped(name="lrs"), Paused()]


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


def test_workers_come_as_late_after_a_recovery_in_a_faster_load() -> None:
    incidents: list[Fact] = [
        WorkerUp(ts=10, replica=0, epoch=1),
        Recovered(ts=300),
        WorkerUp(ts=400, replica=0, epoch=2),
    ]
    assert [fact.ts for fact in sped_up(incidents, first_ns=100, factor_ppm=2_000_000)] == [10, 200, 300]


def test_workers_and_backends_have_their_own_incidents() -> None:
    lost, down = WorkerLost(ts=5, replica=0, epoch=1), BackendDown(ts=6, replica=1, epoch=1, reason="x")
    late = BackendUp(ts=7, replica=2, epoch=4, name="c:1")
    begin = {replica: BackendUp(replica=replica, epoch=1, name=f"{replica}:1") for replica in range(3)}
    sets = [parts(3)]
    assert for_engine([lost, down, late], sets, begin) == [begin[0], begin[1], down, late]
    assert for_engine([lost, down, late], sets) == [*(WorkerUp(replica=n, epoch=1) for n in range(3)), lost]


def test_outages_of_backends_last_as_long_as_they_did() -> None:
    facts: list[Fact] = [
        BackendDown(ts=100, replica=1, epoch=1, reason="x"),
        BackendUp(ts=160, replica=1, epoch=2, name="b:1"),
    ]
    assert [fact.ts for fact in sped_up(facts, first_ns=0, factor_ppm=2_000_000)] == [50, 110]
