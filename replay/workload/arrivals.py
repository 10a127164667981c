"""When the groups of a workload arrive: at their times, at the ends of those they go on from, or in a closed loop."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.replay.workload.workload import Workload


class GroupArrival(NamedTuple):
    """Places of requests in the workload that arrive as one, and when."""

    group: range
    arrival_ns: int


class ArrivalPlan:
    """Asked for arrivals at the start and at the end of each request.

    closed_loop: so many clients, each of which sends the next group in line `pause_ns` after its last one has ended. Of
    the workload's times and sessions only the time of the first arrival counts then. 0: all of them count. Raises
    UsageError for a negative number.
    """

    def __init__(self, workload: Workload, *, closed_loop: int = 0, pause_ns: int = 0) -> None:
        if closed_loop < 0:
            raise UsageError(f"a closed loop of {closed_loop} clients makes no sense; 1 or more, or 0 for none")
        groups = workload.groups()
        self._workload = workload
        self._num_clients = closed_loop
        self._pause_ns = pause_ns
        self.num_groups = len(groups)
        self.num_arrived = 0
        self._waiting_in_line = deque(groups if closed_loop else [])
        self._open = [] if closed_loop else groups
        self._num_unended = {group.start: len(group) for group in groups}
        self._group_of = [group for group in groups for _ in group]
        #: Groups that wait for the end of a request, by its place.
        self._followers: dict[int, list[range]] = {}

    def first(self) -> list[GroupArrival]:
        """Those that wait for nobody."""
        requests = self._workload.requests
        if self._num_clients:
            num_first = min(self._num_clients, len(self._waiting_in_line))
            first = [self._waiting_in_line.popleft() for _ in range(num_first)]
            return [self._arrive(group, requests[0].arrival_ns) for group in first]
        found = []
        for group in self._open:
            parent = requests[group.start].parent
            if parent < 0:
                found.append(self._arrive(group, requests[group.start].arrival_ns))
            else:
                self._followers.setdefault(parent, []).append(group)
        return found

    def ended(self, place: int, now_ns: int) -> list[GroupArrival]:
        """Those that the end of a request lets come. A turn that nobody has thought about comes at its time, or now."""
        found = []
        for group in self._followers.pop(place, ()):
            request = self._workload.requests[group.start]
            due_ns = now_ns + request.think_ns if request.think_ns is not None else max(request.arrival_ns, now_ns)
            found.append(self._arrive(group, due_ns))
        first = self._group_of[place].start
        self._num_unended[first] -= 1
        if not self._num_unended[first] and self._waiting_in_line:
            found.append(self._arrive(self._waiting_in_line.popleft(), now_ns + self._pause_ns))
        return found

    def _arrive(self, group: range, arrival_ns: int) -> GroupArrival:
        self.num_arrived += 1
        return GroupArrival(group, arrival_ns)
