"""Faults that were set, and those of them that have struck: a full disk that nobody writes to has not."""

from __future__ import annotations

from collections import Counter

from tests.world.plans.faults import FaultKind

#: What is counted under such a name is a fault by itself, which is drawn where it strikes.
_OWN = ": "


class FaultCount:
    """By kind. hits: what the world counts of calls, turns and the like that have met a fault, by what it was."""

    def __init__(self, hits: Counter[str]) -> None:
        self._hits = hits
        self._set: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        #: Of the last fault of each kind, unless it strikes at once: its kind, and how many hits there were before.
        self._last: dict[str, tuple[FaultKind, int]] = {}

    def add(self, name: str, kind: FaultKind) -> None:
        """One is set. From now on hits are its own, and no longer those of the last one of its kind."""
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
        """How many were set, how many of those have struck, and the hits. None is set any more."""
        for name in [*self._last]:
            self._settle(name)
        own = {what: count for what, count in self._hits.items() if _OWN in what}
        hits = {what: count for what, count in self._hits.items() if count and what not in own}
        return {"faults_set": self._set | own, "faults": +self._struck | own, "hits": hits}
