"""Where the time of a step goes, by operation: a stopwatch whose laps are added up by name."""

from __future__ import annotations

import time


class OpTimer:
    """Runs from when it is made; each `lap` adds the time since the one before to an operation."""

    def __init__(self) -> None:
        self.times_ns: dict[str, int] = {}
        self._last_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """The operation `name` ends here."""
        now_ns = time.perf_counter_ns()
        self.times_ns[name] = self.times_ns.get(name, 0) + now_ns - self._last_ns
        self._last_ns = now_ns

    def share(self, times_ns: dict[str, int], *, rest: str) -> None:
        """The lap that ends here went to these operations, and the rest of it to `rest`."""
        for name, time_ns in times_ns.items():
            self.times_ns[name] = self.times_ns.get(name, 0) + time_ns
            self._last_ns += time_ns
        self.lap(rest)
