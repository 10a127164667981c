"""Virtual time, which advances from one scheduled action to the next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """A clock that stands still until it is advanced. Ties are ordered by rank, then by the order of the calls.

    now_ns: when it begins.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns
        self._agenda: list[tuple[int, int, int, Callable[[], None]]] = []
        self._num_entries = 0

    def now_ns(self) -> int:
        """The time of the last advance."""
        return self._now_ns

    @property
    def has_more(self) -> bool:
        """Whether any action is still scheduled."""
        return bool(self._agenda)

    def at(self, due_ns: int, action: Callable[[], None], rank: int = 0) -> None:
        """Schedule an action at a time that has not passed."""
        heappush(self._agenda, (due_ns, rank, self._num_entries, action))
        self._num_entries += 1

    def call_at(self, due_ns: int, action: Callable[[], None]) -> Callable[[], None]:
        """The same for a timer of the loop, which ignores calls that it has cancelled."""
        self.at(due_ns, action)
        return lambda: None

    def advance(self) -> int:
        """Go to the next scheduled time and run all its actions; returns the time."""
        agenda = self._agenda
        self._now_ns = now_ns = agenda[0][0]
        while agenda and agenda[0][0] <= now_ns:
            heappop(agenda)[3]()
        return now_ns
