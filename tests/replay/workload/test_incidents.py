from __future__ import annotations

from collections.abc import Sequence

import pytest

from eventlm.config import CoreConfig
from eventlm.core.predictor import Predictor
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.events import Fact, Paused, PolicySwapped, Resumed, WorkerLost, WorkerUp
from eventlm.replay.workload.incidents import for_engine, sped_up


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


def placed(*incidents: Fact, sets: Sequence[SetParts], replicas: Sequence[int] = ()) -> list[Fact]:
    """What befalls an engine with these sets. replicas: how many each set had before."""
    return for_engine(incidents, sets, {f"{number}": parts(number).config for number in replicas})


def test_a_replica_has_a_worker_from_the_start_unless_its_incidents_begin_with_one() -> None:
    lost = WorkerLost(ts=5, replica=0, epoch=1)
    late = WorkerUp(ts=9, replica=1, epoch=3)
    found = placed(lost, late, sets=[parts(3)])
    assert found == [WorkerUp(replica=0, epoch=1), WorkerUp(replica=2, epoch=1), lost, late]
    # Replicas that the engine does not have.
    assert placed(lost, late, sets=[parts(1)]) == [WorkerUp(replica=0, epoch=1), lost]


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


def test_replicas_of_several_sets_are_as_many_as_they_were() -> None:
    lost = WorkerLost(ts=5, replica=2, epoch=1)
    assert placed(lost, replicas=(1, 2), sets=[parts(1), parts(2)])[-1] == lost
    with pytest.raises(UsageError, match=r"of sets with \[1, 2\] of them, and here are \[2, 2\]"):
        placed(lost, replicas=(1, 2), sets=[parts(2), parts(2)])
    assert placed(Paused(ts=5), replicas=(1, 2), sets=[parts(2), parts(2)])[-1] == Paused(ts=5)


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
