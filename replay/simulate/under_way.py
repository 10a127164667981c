"""Where a simulation begins that starts in the middle of a run, and the work that remains from there.

A core restored from a snapshot knows its sequences, queues, blocks and timers. It does not know what surrounds it: what
the sequences will still generate, which steps its workers compute, which ends and cancels are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from eventlm.events import Launched
from eventlm.replay.workload.workload import Workload, WorkloadRequest


class UnderWay(NamedTuple):
    """What is under way around a core between two drains.

    seqs: the live requests, which are the first of the workload, in its order. launches: the steps in flight (see
    `launches_in_flight`). fact_times_ns: when text ends and cancels of the recorded run were applied, by their seqs
    there.
    """

    seqs: Sequence[int]
    launches: Sequence[Launched]
    fact_times_ns: Mapping[int, int]


def remaining_work(workload: Workload, live: Iterable[int], s: int) -> Workload:
    """The requests of a recorded run that are live after event `s`, and behind them those that arrive later.

    live: their seqs. A turn whose parent has ended by then comes at its recorded time.
    """
    places = {request.s: index for index, request in enumerate(workload.requests)}
    chosen = [places[seq] for seq in live]
    num_live = len(chosen)
    chosen += [index for index, request in enumerate(workload.requests) if request.s > s]
    new_places = {index: place for place, index in enumerate(chosen)}
    requests = [
        _alone(workload.requests[index]) if place < num_live else _after(workload.requests[index], new_places)
        for place, index in enumerate(chosen)
    ]
    return structs.replace(workload, requests=requests)


def _alone(request: WorkloadRequest) -> WorkloadRequest:
    """A request that has arrived: its group and its parent are of the past."""
    arrival = structs.replace(request.arrival, group_size=1, group_index=0)
    return structs.replace(request, arrival=arrival, parent=-1, think_ns=None)


def _after(request: WorkloadRequest, places: Mapping[int, int]) -> WorkloadRequest:
    parent = places.get(request.parent, -1)
    return structs.replace(request, parent=parent, think_ns=request.think_ns if parent >= 0 else None)
