"""Lanes: rows of a timeline, as few as overlapping slices need."""

from __future__ import annotations

import heapq


class Lanes:
    """Gives each slice the first lane that has been free since before it began."""

    def __init__(self) -> None:
        self._free: list[int] = []
        #: When each lane was given back.
        self._end_ns: list[int] = []

    def __len__(self) -> int:
        return len(self._end_ns)

    def take(self, start_ns: int) -> int:
        """A lane for a slice that begins at `start_ns`."""
        busy = []
        while self._free:
            lane = heapq.heappop(self._free)
            if self._end_ns[lane] <= start_ns:
                break
            busy.append(lane)
        else:
            lane = len(self._end_ns)
            self._end_ns.append(start_ns)
        for each in busy:
            heapq.heappush(self._free, each)
        return lane

    def give(self, lane: int, end_ns: int) -> None:
        """The slice in it has ended."""
        self._end_ns[lane] = end_ns
        heapq.heappush(self._free, lane)
