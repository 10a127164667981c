"""Handlers of errors that no seed leads to, and why."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from tests.world.swarm.handlers import all_handlers

#: Patterns of their names, by the reason.
REASONS: dict[str, tuple[str, ...]] = {}


@cache
def unreached() -> frozenset[str]:
    """Those that match."""
    patterns = [pattern for each in REASONS.values() for pattern in each]
    return frozenset(name for name in all_handlers() if any(fnmatchcase(name, pattern) for pattern in patterns))
