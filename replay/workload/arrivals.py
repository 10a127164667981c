"""When the groups of a workload arrive: at their own times, after the turn that they continue, or in a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.replay.workload.workload import Workload


class GroupArrival(NamedTuple):
    """Indices of requests in the workload that arrive together, and when."""

    group: range
    arrival_ns: int


class ArrivalPlan:
    """Gives the first arrivals, and those that follow the end of each request.

    closed_loop: number of clients, each of which sends the next group when its last one has ended, after one of
    `pauses_ns`, which are used in turn. The workload's own times and sessions are then ignored, except for the time of
    the first arrival. 0: they apply. num_arrived: the first so many requests, each a group of its own, have arrived.
    Raises UsageError for a negative number.
    """

    def __init__(
        self, workload: Workload, *, closed_loop: int = 0, pauses_ns: Sequence[int] = (), num_arrived: int = 0
    ) -> None:
        if closed_loop < 0:
            raise UsageError(f"a closed loop of {closed_loop} clients is impossible; 1 or more, or 0 for none")
        groups = workload.groups()
        self._requests = workload.requests
        self._num_clients = closed_loop
        self._pauses_ns = pauses_ns or (0,)
        self._queue = deque(groups if closed_loop else [])
        self._open = [] if closed_loop else groups[num_arrived:]
        self._num_unended = {group.start: len(group) for group in groups}
        self._group_of = [group for group in groups for _ in group]
        #: Groups that wait for the end of a request, by its index.
        self._followers: dict[int, list[range]] = {}

    def first(self) -> list[GroupArrival]:
        """Those that wait for no other request."""
        if self._num_clients:
            num_first = min(self._num_clients, len(self._queue))
            return [GroupArrival(self._queue.popleft(), self._requests[0].arrival_ns) for _ in range(num_first)]
        found = []
        for group in self._open:
            request = self._requests[group.start]
            if request.parent < 0:
                found.append(GroupArrival(group, request.arrival_ns))
            else:
                self._followers.setdefault(request.parent, []).append(group)
        return found

    def ended(self, index: int, now_ns: int) -> list[GroupArrival]:
        """Those that follow the end of a request. A turn without a think time comes at its own time, or now."""
        found = []
        for group in self._followers.pop(index, ()):
            request = self._requests[group.start]
            due_ns = now_ns + request.think_ns if request.think_ns is not None else max(request.arrival_ns, now_ns)
            found.append(GroupArrival(group, due_ns))
        first = self._group_of[index].start
        self._num_unended[first] -= 1
        if not self._num_unended[first] and self._queue:
            num_paused = len(self._num_unended) - len(self._queue) - self._num_clients
            pause_ns = self._pauses_ns[num_paused % len(self._pauses_ns)]
            found.append(GroupArrival(self._queue.popleft(), now_ns + pause_ns))
        return found
