"""Counts the faults that were set, and those that have struck. A full disk that nobody writes to has not struck."""

from __future__ import annotations

from collections import Counter

from tests.world.plans.faults import FaultKind

#: Marks the names of faults that are counted by themselves, since they are drawn where they strike.
_OWN = ": "


class FaultCount:
    """Counts faults by kind. hits: the world's counts of calls, turns and the like that a fault has affected, by
    effect.
    """

    def __init__(self, hits: Counter[str]) -> None:
        self._hits = hits
        self._set: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        #: The last fault of each kind, unless it strikes at once: its kind, and the number of hits before it was set.
        self._last: dict[str, tuple[FaultKind, int]] = {}

    def add(self, name: str, kind: FaultKind) -> None:
        """Count a fault that was set. From now on, hits are due to it, not to the previous fault of its kind."""
        self._settle(name)
        self._set[name] += 1
        if kind.hits:
            self._last[name] = kind, self._num_hits(kind)
        else:
            self._struck[name] += 1

    def _num_hits(self, kind: FaultKind) -> int:
        return sum(count for what, count in self._hits.items() if what.startswith(kind.hits))

    def _settle(self, name: str) -> None:
        if name in self._last:
            kind, num_before = self._last.pop(name)
            self._struck[name] += self._num_hits(kind) > num_before

    def counts(self) -> dict[str, dict[str, int]]:
        """How many faults were set, how many of them struck, and the hits. Call this when no more will be set."""
        for name in [*self._last]:
            self._settle(name)
        own = {what: count for what, count in self._hits.items() if _OWN in what}
        hits = {what: count for what, count in self._hits.items() if count and what not in own}
        return {"faults_set": self._set | own, "faults": +self._struck | own, "hits": hits}
