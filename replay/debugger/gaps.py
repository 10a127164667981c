"""Events of a run in order: which numbers exist, and how many steps one is from another where some are missing."""

from __future__ import annotations

import numpy as np

from eventlm.bus.log_reader import LogReader
from eventlm.events import Gap
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import MarkKind


class EventNumbers:
    """The events from `first_s` to `last_s`, without those in gaps."""

    def __init__(self, index: Index) -> None:
        self.first_s = index.facts.first_s
        self.last_s = index.facts.next_s - 1
        self.gaps: list[tuple[int, int]] = []
        marks = index.marks["s"][index.marks["kind"] == MarkKind.GAP].tolist()
        if marks:
            with LogReader(index.path) as reader:
                for s in marks:
                    event = next(iter(reader.lines_from(s))).event()
                    if isinstance(event, Gap) and event.first > self.first_s:
                        self.gaps.append((event.first, event.last))

    def gap_with(self, s: int) -> tuple[int, int] | None:
        """The gap that a number lies in."""
        return next(((first, last) for first, last in self.gaps if first <= s <= last), None)

    def num_until(self, s: int) -> int:
        """How many there are up to one of them, with it."""
        return s - self.first_s + 1 - sum(last - first + 1 for first, last in self.gaps if last < s)

    def moved(self, s: int, count: int) -> int | None:
        """The event that is `count` events after another, or before it; None beyond the ends."""
        starts = np.array([self.first_s, *(last + 1 for _, last in self.gaps)], np.int64)
        ends = np.array([*(first - 1 for first, _ in self.gaps), self.last_s], np.int64)
        sizes = ends - starts + 1
        before = np.concatenate(([0], np.cumsum(sizes)))
        part = int(np.searchsorted(starts, s, side="right")) - 1
        ordinal = int(before[part]) + s - int(starts[part]) + count
        if not 0 <= ordinal < int(before[-1]):
            return None
        part = int(np.searchsorted(before, ordinal, side="right")) - 1
        return int(starts[part]) + ordinal - int(before[part])
