"""Facts from outside that belong to no request: workers that come and go, pauses, swaps, flushed caches.

They are part of what an engine went through, as its requests are, and also apply to another engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.state.replicaset import SetParts
from eventlm.errors import UsageError
from eventlm.events import (
    CacheFlushed,
    Desynced,
    Fact,
    FrontEndLost,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Resumed,
    WorkerLost,
    WorkerUp,
)

INCIDENTS = (
    WorkerUp,
    WorkerLost,
    Desynced,
    Paused,
    Resumed,
    PolicySwapped,
    PredictorSwapped,
    CacheFlushed,
    FrontEndLost,
)
#: Incidents of one replica.
OF_REPLICA = (WorkerUp, WorkerLost, Desynced)


def for_engine(incidents: Sequence[Fact], sets: Sequence[SetParts], recorded: Mapping[str, CoreConfig]) -> list[Fact]:
    """The facts for an engine with these replicasets, in order. recorded: the limits of the engine that had them.

    A replica whose incidents do not begin with a worker has one from the start. Incidents of replicas that the engine
    does not have are left out. Raises UsageError for a swap to a policy that is not installed, and for replicas whose
    sets are not the engine's.
    """
    num_replicas = sum(each.config.num_replicas for each in sets)
    begun: dict[int, Fact] = {}
    found: list[Fact] = []
    for fact in incidents:
        if isinstance(fact, PolicySwapped):
            _check_swap(fact, sets)
        if isinstance(fact, OF_REPLICA):
            _check_replicas(sets, recorded)
            if fact.replica >= num_replicas:
                continue
            begun.setdefault(fact.replica, fact)
        found.append(fact)
    started: list[Fact] = [
        WorkerUp(replica=replica, epoch=1)
        for replica in range(num_replicas)
        if not isinstance(begun.get(replica), WorkerUp)
    ]
    return started + found


def _check_swap(fact: PolicySwapped, sets: Sequence[SetParts]) -> None:
    meant = sets if fact.replicaset < 0 else sets[fact.replicaset : fact.replicaset + 1]
    if not meant or any(fact.name not in each.plugins.policies for each in meant):
        raise UsageError(
            f"the workload swaps to the policy {fact.name} at {fact.ts / 1e9:g} s, which is not installed; give "
            f"--extra-policy {fact.name}"
        )


def _check_replicas(sets: Sequence[SetParts], recorded: Mapping[str, CoreConfig]) -> None:
    """The numbers of replicas run across the sets, so those of several must be as many as they were."""
    before = [core.num_replicas for core in recorded.values()]
    here = [each.config.num_replicas for each in sets]
    if max(len(before), len(here)) > 1 and before != here:
        raise UsageError(
            f"the workload has what befell the replicas of sets with {before} of them, and here are {here}: give each "
            "set as many as it had, or take those lines out of the workload"
        )


def sped_up(incidents: Sequence[Fact], *, first_ns: int, factor_ppm: int) -> list[Fact]:
    """The same at the same positions in a load whose arrivals are closer together, from the first one on.

    Outages last as long as they did: a worker starts no faster.
    """
    #: By replica, or "pause": when an outage began, and when it does now.
    began: dict[object, tuple[int, int]] = {}
    found = []
    for fact in incidents:
        key = getattr(fact, "replica", "pause")
        if isinstance(fact, WorkerUp | Resumed) and key in began:
            before_ns, now_ns = began.pop(key)
            due_ns = now_ns + fact.ts - before_ns
        else:
            due_ns = fact.ts if fact.ts < first_ns else first_ns + (fact.ts - first_ns) * 1_000_000 // factor_ppm
        if isinstance(fact, WorkerLost | Desynced | Paused):
            began.setdefault(key, (fact.ts, due_ns))
        found.append(structs.replace(fact, ts=due_ns))
    return sorted(found, key=lambda fact: (fact.ts, fact.s))
