"""Clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds."""

    def monotonic_ns(self) -> int:
        """Since some moment in the past. Never goes back, and is the same in all processes of a host."""
        ...

    def unix_ns(self) -> int:
        """Since 1970. May be set back."""
        ...

    def unix_s(self) -> int:
        """The same in whole seconds."""
        ...


class SystemClock:
    """The host's own."""

    def monotonic_ns(self) -> int:
        """As Clock says."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """As Clock says."""
        return time.time_ns()

    def unix_s(self) -> int:
        """As Clock says."""
        return time.time_ns() // 1_000_000_000
