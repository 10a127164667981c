"""Closed loops: a fixed number of clients, each of which sends its next request when its last one has ended.

The arrivals of such a run depend on the engine that served it. Replayed at their recorded times, they limit any other
engine to the recorded throughput.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from eventlm.replay.workload.workload import NEVER, Workload

#: The number of clients is the concurrency that is not exceeded in this part of the time; the rest allows for strays.
PEAK_PERCENT = 99
#: The median concurrency must be at least this part of the clients.
BUSY_PERCENT = 95
#: Least number of requests that must arrive after all clients have begun, in addition to one for each client.
MIN_ARRIVALS = 16
#: A queue that is full most of the time looks similar, but rejects requests.
MAX_REJECTED_PERCENT = 1


class ClosedLoop(NamedTuple):
    """Clients, each of which sends its next request a pause after its last one has ended. pauses_ns: all pauses of the
    run, in order.
    """

    num_clients: int
    pauses_ns: Sequence[int] = ()

    def shuffled(self, seed: int) -> Sequence[int]:
        """The pauses in another order for each seed; 0: as they were."""
        return random.Random(f"{seed}").sample(self.pauses_ns, len(self.pauses_ns)) if seed else self.pauses_ns


def find_closed_loop(workload: Workload, ends_ns: Sequence[int], *, num_rejected: int) -> ClosedLoop | None:
    """The closed loop that a run's arrivals look like, if any.

    ends_ns: when each of the workload's requests ended in the run; -1: unknown. Turns of conversations are not a closed
    loop: the workload already links them.
    """
    groups = workload.groups()
    num_turns = sum(workload.requests[group.start].parent >= 0 for group in groups)
    if num_rejected * 100 > len(ends_ns) * MAX_REJECTED_PERCENT or num_turns * 2 > len(groups):
        return None
    starts = sorted(workload.requests[group.start].arrival_ns for group in groups)
    ends = sorted(max(ends_ns[index] if ends_ns[index] >= 0 else NEVER for index in group) for group in groups)
    levels = _levels(starts, ends)
    num_clients = _quantile(levels, PEAK_PERCENT)
    complete_ns = next((level.start_ns for level in levels if level.num_open >= num_clients), NEVER)
    following = [index for index, start_ns in enumerate(starts) if start_ns > complete_ns and index >= num_clients]
    if len(following) < max(MIN_ARRIVALS, num_clients):
        return None
    median = _quantile([level for level in levels if level.start_ns >= complete_ns], 50)
    if median * 100 < num_clients * BUSY_PERCENT:
        return None
    pauses_ns = [max(starts[index] - ends[index - num_clients], 0) for index in following]
    return ClosedLoop(num_clients, pauses_ns)


class _Level(NamedTuple):
    """A period in which `num_open` groups of requests had arrived and not ended."""

    num_open: int
    start_ns: int
    duration_ns: int


def _levels(starts: Sequence[int], ends: Sequence[int]) -> list[_Level]:
    """From the first arrival to the last; both lists are sorted."""
    found = []
    num_ended = 0
    for num_started, (start_ns, next_ns) in enumerate(pairwise(starts), start=1):
        now_ns = start_ns
        while num_ended < num_started and ends[num_ended] <= next_ns:
            end_ns = max(ends[num_ended], now_ns)
            found.append(_Level(num_started - num_ended, now_ns, end_ns - now_ns))
            now_ns, num_ended = end_ns, num_ended + 1
        found.append(_Level(num_started - num_ended, now_ns, next_ns - now_ns))
    return [level for level in found if level.duration_ns]


def _quantile(levels: Sequence[_Level], percent: int) -> int:
    """The value that `num_open` does not exceed in `percent` of the time."""
    total_ns = sum(level.duration_ns for level in levels)
    seen_ns = 0
    for level in sorted(levels):
        seen_ns += level.duration_ns
        if seen_ns * 100 >= total_ns * percent:
            return level.num_open
    return 0
