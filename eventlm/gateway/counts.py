"""Numbers that backends tell. They go into the log and to other processes, so none is larger than those hold."""

from __future__ import annotations

#: A 32-bit integer, as tokens and requests are elsewhere.
MOST = (1 << 31) - 1


def count_of(value: float | None, *, unknown: int = -1) -> int:
    """A count that a backend tells, rounded, and at most `MOST`; `unknown` for what is no count."""
    # Not `value < 0`: NaN is no count either.
    if value is None or not value >= 0:
        return unknown
    return round(min(value, MOST))
