"""Clocks."""

from __future__ import annotations

import time
from pathlib import Path
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

    def boot_id(self) -> str:
        """Of the host's present boot, for which `monotonic_ns` is one clock; empty: not known."""
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

    def boot_id(self) -> str:
        """As Clock says."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
