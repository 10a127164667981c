"""Parts of a workload: what is left of it without some of its requests, and which belong together."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from eventlm.replay.workload.workload import Workload, WorkloadRequest


def keep_requests(workload: Workload, indices: Sequence[int]) -> Workload:
    """The requests with these indices, in ascending order.

    A request whose parent is left out follows the nearest kept request that the parent followed; without one it comes
    at its own time. A group shrinks to its kept members.
    """
    new_index = {index: new for new, index in enumerate(indices)}
    group_of = {index: group for group in workload.groups() for index in group}
    members: dict[int, list[int]] = {}
    for index in indices:
        members.setdefault(group_of[index].start, []).append(index)
    requests = []
    for index in indices:
        request = workload.requests[index]
        group = members[group_of[index].start]
        arrival = structs.replace(request.arrival, group_size=len(group), group_index=group.index(index))
        # Only the first of a group says whom it follows.
        first = workload.requests[group_of[index].start]
        parent = _kept_parent(workload, first if group[0] == index else request, new_index)
        request = structs.replace(request, arrival=arrival, parent=parent)
        requests.append(structs.replace(request, think_ns=None) if parent < 0 else request)
    return structs.replace(workload, requests=requests)


def _kept_parent(workload: Workload, request: WorkloadRequest, new_index: dict[int, int]) -> int:
    parent = request.parent
    while parent >= 0 and parent not in new_index:
        parent = workload.requests[parent].parent
    return new_index.get(parent, -1)


def conversations(workload: Workload) -> list[list[int]]:
    """Indices of requests that follow each other or arrive as one, in order of their first."""
    root = list(range(len(workload.requests)))

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    def join(first: int, second: int) -> None:
        low, high = sorted((find(first), find(second)))
        root[high] = low

    for group in workload.groups():
        for index in group:
            join(group.start, index)
    for index, request in enumerate(workload.requests):
        if request.parent >= 0:
            join(index, request.parent)
    found: dict[int, list[int]] = {}
    for index in range(len(root)):
        found.setdefault(find(index), []).append(index)
    return list(found.values())
