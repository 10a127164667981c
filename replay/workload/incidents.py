"""Facts from outside that belong to no request: workers that come and go, pauses, swaps, flushed caches.

They are part of what an engine went through, as its requests are, and also apply to another engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec import structs

from eventlm.core.state.replicaset import SetParts
from eventlm.errors import UsageError
from eventlm.events import (
    BackendDown,
    BackendState,
    BackendUp,
    CacheFlushed,
    Desynced,
    Fact,
    FrontEndLost,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Recovered,
    Resumed,
    WorkerLost,
    WorkerUp,
)

INCIDENTS = (
    WorkerUp,
    WorkerLost,
    Desynced,
    BackendUp,
    BackendDown,
    BackendState,
    Paused,
    Resumed,
    PolicySwapped,
    PredictorSwapped,
    CacheFlushed,
    FrontEndLost,
    Recovered,
)
#: Incidents of one replica with a worker, and of one that is another server.
OF_WORKER = (WorkerUp, WorkerLost, Desynced)
OF_BACKEND = (BackendUp, BackendDown, BackendState)
OF_REPLICA = (*OF_WORKER, *OF_BACKEND)
#: Incidents of one replicaset, or of all.
OF_SET = (PolicySwapped, PredictorSwapped, CacheFlushed)


def ranges_of_replicas(counts: Iterable[int]) -> list[range]:
    """The numbers of the replicas of sets that have so many each; they run across the sets."""
    return [range(*ends) for ends in pairwise(accumulate(counts, initial=0))]


def renumbered(incidents: Sequence[Fact], before: Mapping[str, int], here: Mapping[str, int]) -> list[Fact]:
    """The incidents of an engine for another one, replicas and sets under the numbers that they have there.

    before, here: by the names of the replicasets, how many replicas each has. What is about a replica or a set that the
    other engine does not have is left out.
    """
    ranges = dict(zip(here, ranges_of_replicas(here.values()), strict=True))
    numbers: dict[int, int] = {}
    for name, own in zip(before, ranges_of_replicas(before.values()), strict=True):
        numbers |= dict(zip(own, ranges.get(name, ()), strict=False))
    names = [*here]
    sets = {index: names.index(name) for index, name in enumerate(before) if name in here}
    found: list[Fact] = []
    for fact in incidents:
        if isinstance(fact, OF_REPLICA):
            if fact.replica in numbers:
                found.append(structs.replace(fact, replica=numbers[fact.replica]))
        elif isinstance(fact, OF_SET) and fact.replicaset >= 0:
            if fact.replicaset in sets:
                found.append(structs.replace(fact, replicaset=sets[fact.replicaset]))
        else:
            found.append(fact)
    return found


def for_engine(
    incidents: Sequence[Fact], sets: Sequence[SetParts], backends: Mapping[int, BackendUp] | None = None
) -> list[Fact]:
    """The facts for an engine with these replicasets, in order. backends: the replicas that are other servers, with
    their beginning.

    A replica whose incidents do not begin with a worker, or a server, has one from the start; one without incidents has
    another one as soon as the engine was recovered. Incidents of replicas that the engine does not have are left out,
    and those of workers where it has servers. Raises UsageError for a swap to a policy that is not installed.
    """
    num_replicas = sum(each.config.num_replicas for each in sets)
    servers = backends or {}
    named = {fact.replica for fact in incidents if isinstance(fact, OF_REPLICA)}
    begun: dict[int, Fact] = {}
    found: list[Fact] = []
    epoch = 1
    for fact in incidents:
        if isinstance(fact, PolicySwapped):
            _check_swap(fact, sets)
        if isinstance(fact, Recovered):
            epoch += 1
            others = [
                _up(replica, servers, ts=fact.ts, epoch=epoch)
                for replica in range(num_replicas)
                if replica not in named
            ]
            found += [fact, *others]
            continue
        if isinstance(fact, OF_REPLICA):
            if fact.replica >= num_replicas or isinstance(fact, OF_BACKEND) != (fact.replica in servers):
                continue
            begun.setdefault(fact.replica, fact)
        found.append(fact)
    started: list[Fact] = [
        _up(replica, servers)
        for replica in range(num_replicas)
        if not isinstance(begun.get(replica), WorkerUp | BackendUp)
    ]
    return started + found


def _up(replica: int, servers: Mapping[int, BackendUp], *, ts: int = 0, epoch: int = 1) -> Fact:
    """A replica has a worker, or is a server that takes requests."""
    if replica in servers:
        return structs.replace(servers[replica], ts=ts, epoch=servers[replica].epoch + epoch - 1)
    return WorkerUp(ts=ts, replica=replica, epoch=epoch)


def _check_swap(fact: PolicySwapped, sets: Sequence[SetParts]) -> None:
    meant = sets if fact.replicaset < 0 else sets[fact.replicaset : fact.replicaset + 1]
    if not meant or any(fact.name not in each.plugins.policies for each in meant):
        raise UsageError(
            f"the workload swaps to the policy {fact.name} at {fact.ts / 1e9:g} s, which is not installed; give "
            f"--extra-policy {fact.name}"
        )


def sped_up(incidents: Sequence[Fact], *, first_ns: int, factor_ppm: int) -> list[Fact]:
    """The same at the same positions in a load whose arrivals are closer together, from the first one on.

    Outages last as long as they did: a worker starts no faster.
    """
    replicas = {fact.replica: None for fact in incidents if isinstance(fact, OF_REPLICA)}
    #: By replica, or "pause": when an outage began, and when it does now.
    began: dict[object, tuple[int, int]] = {}
    found = []
    for fact in incidents:
        key = getattr(fact, "replica", "pause")
        if isinstance(fact, WorkerUp | BackendUp | Resumed) and key in began:
            before_ns, now_ns = began.pop(key)
            due_ns = now_ns + fact.ts - before_ns
        else:
            due_ns = fact.ts if fact.ts < first_ns else first_ns + (fact.ts - first_ns) * 1_000_000 // factor_ppm
        if isinstance(fact, WorkerLost | Desynced | BackendDown | Paused):
            began.setdefault(key, (fact.ts, due_ns))
        elif isinstance(fact, Recovered):
            for replica in replicas:
                began.setdefault(replica, (fact.ts, due_ns))
        found.append(structs.replace(fact, ts=due_ns))
    return sorted(found, key=lambda fact: (fact.ts, fact.s))
