"""Closed loops: a fixed number of clients, each of which sends its next request when its last one has ended.

The arrivals of such a run depend on the engine that served it. Replayed at their recorded times they keep any other
engine at the recorded throughput.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from eventlm.replay.workload.workload import NEVER, Workload

#: A share of the time, in percent, in which no more clients wait than there are. The rest is for stray requests.
PEAK_PERCENT = 99
#: For half of the time at least so many percent of the clients wait for an answer.
BUSY_PERCENT = 95
#: Requests that must have arrived when all clients were there, beside one for each client.
MIN_ARRIVALS = 16
#: A queue that is full most of the time looks alike, but turns requests away.
MAX_REJECTED_PERCENT = 1


class ClosedLoop(NamedTuple):
    """So many clients, each of which sends its next request `pause_ns` after its last one has ended."""

    num_clients: int
    pause_ns: int = 0


def find_closed_loop(workload: Workload, ends_ns: Sequence[int], *, num_rejected: int) -> ClosedLoop | None:
    """The closed loop that a run's arrivals look like, if they do.

    ends_ns: when each of the workload's requests ended in the run; -1: the run does not show it. Turns of conversations
    that follow one another are no closed loop: the workload already ties them to each other.
    """
    groups = workload.groups()
    num_turns = sum(workload.requests[group.start].parent >= 0 for group in groups)
    if num_rejected * 100 > len(ends_ns) * MAX_REJECTED_PERCENT or num_turns * 2 > len(groups):
        return None
    starts = sorted(workload.requests[group.start].arrival_ns for group in groups)
    ends = sorted(max(ends_ns[place] if ends_ns[place] >= 0 else NEVER for place in group) for group in groups)
    levels = _levels(starts, ends)
    num_clients = _quantile(levels, PEAK_PERCENT)
    complete_ns = next((level.start_ns for level in levels if level.num_open >= num_clients), NEVER)
    following = [place for place, start_ns in enumerate(starts) if start_ns > complete_ns and place >= num_clients]
    if len(following) < max(MIN_ARRIVALS, num_clients):
        return None
    median = _quantile([level for level in levels if level.start_ns >= complete_ns], 50)
    if median * 100 < num_clients * BUSY_PERCENT:
        return None
    pauses_ns = [max(starts[place] - ends[place - num_clients], 0) for place in following]
    return ClosedLoop(num_clients, sum(pauses_ns) // len(pauses_ns))


class _Level(NamedTuple):
    """For so long, so many groups of requests had arrived and not ended."""

    num_open: int
    start_ns: int
    duration_ns: int


def _levels(starts: Sequence[int], ends: Sequence[int]) -> list[_Level]:
    """From the first arrival to the last, both given in order."""
    found = []
    num_ended = 0
    for place, (start_ns, next_ns) in enumerate(pairwise(starts), start=1):
        now_ns = start_ns
        while num_ended < place and ends[num_ended] <= next_ns:
            end_ns = max(ends[num_ended], now_ns)
            found.append(_Level(place - num_ended, now_ns, end_ns - now_ns))
            now_ns, num_ended = end_ns, num_ended + 1
        found.append(_Level(place - num_ended, now_ns, next_ns - now_ns))
    return [level for level in found if level.duration_ns]


def _quantile(levels: Sequence[_Level], percent: int) -> int:
    """What `num_open` does not exceed in so many percent of the time."""
    total_ns = sum(level.duration_ns for level in levels)
    seen_ns = 0
    for level in sorted(levels):
        seen_ns += level.duration_ns
        if seen_ns * 100 >= total_ns * percent:
            return level.num_open
    return 0
