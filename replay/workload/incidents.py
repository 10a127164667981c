"""Facts from outside that belong to no request: workers that come and go, pauses, swaps, flushed caches.

They are part of what an engine went through, as its requests are, and also apply to another engine.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from msgspec import structs

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


def for_engine(incidents: Sequence[Fact], *, num_replicas: int, policies: Container[str]) -> list[Fact]:
    """The facts for an engine with these replicas and installed policies, in order.

    A replica whose incidents do not begin with a worker has one from the start. Incidents of replicas that the engine
    does not have are left out. Raises UsageError for a swap to a policy that is not installed.
    """
    first: dict[int, Fact] = {}
    found: list[Fact] = []
    for fact in incidents:
        if isinstance(fact, PolicySwapped) and fact.name not in policies:
            raise UsageError(
                f"the workload swaps to the policy {fact.name} at {fact.ts / 1e9:g} s, which is not installed; give "
                f"--extra-policy {fact.name}"
            )
        if isinstance(fact, OF_REPLICA):
            if fact.replica >= num_replicas:
                continue
            first.setdefault(fact.replica, fact)
        found.append(fact)
    started: list[Fact] = [
        WorkerUp(replica=replica, epoch=1)
        for replica in range(num_replicas)
        if not isinstance(first.get(replica), WorkerUp)
    ]
    return started + found


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
