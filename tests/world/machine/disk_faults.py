"""What may go wrong with a simulated disk, and what the disk needs from its world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple


class DiskFaults(NamedTuple):
    """The faults of a disk. Each of the first five strikes one call in that many, when a draw is 0 modulo the number;
    0: never.

    errors: EIO on writes and on changes of names. slow: calls take up to `most_slow_ns`. bit_rot: a bit on the medium
    has flipped when the file is opened. capacity: bytes of all files together. unreadable: files that cannot be opened.
    """

    errors: int = 0
    sync_errors: int = 0
    short_writes: int = 0
    slow: int = 0
    bit_rot: int = 0
    most_slow_ns: int = 1_000_000_000
    capacity: int | None = None
    is_read_only: bool = False
    has_links: bool = True
    unreadable: frozenset[Path] = frozenset()


class Surroundings:
    """What a disk needs from its world. In this base class nothing goes wrong and no time passes.

    faults: how often each fault has struck.
    """

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def unix_ns(self) -> int:
        """The host's wall clock."""
        return 0

    def draw(self, what: str, number: int) -> int:
        """Any number >= 0, always the same for the same arguments. 1 makes no fault happen."""
        return 1

    def fault(self, what: str, number: int) -> None:
        """Note that a fault has struck. If it was drawn, the arguments are the name and number of the draw."""
        self.faults[what] += 1

    def spend(self, ns: int) -> None:
        """The call that has just begun takes this long."""

    def before_call(self, process: str, name: str, path: Path) -> bool:
        """Called before each call; may raise what ends the process. True: do only half of the call, then `after_call`
        raises that. Half of a write is part of the content, half of `make_folders` is one folder; any other call is
        done whole.
        """
        return False

    def after_call(self, process: str, name: str, path: Path) -> None:
        """Called after each call, also when it failed. May raise what ends the process."""
