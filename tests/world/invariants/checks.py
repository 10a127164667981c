"""The named invariants of a world, and how often each was checked."""

from __future__ import annotations

from collections import Counter


class BrokenInvariant(AssertionError):
    """An invariant does not hold. name: of the invariant."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name


class Checks:
    """Counts the checks, and stops at the first that fails."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def check(self, name: str, holds: bool, detail: str) -> None:
        """Count a check. Raises BrokenInvariant if the invariant does not hold."""
        self.counts[name] += 1
        if not holds:
            raise BrokenInvariant(name, detail)
