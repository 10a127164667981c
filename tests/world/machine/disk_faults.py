"""What may go wrong with a simulated disk, and what the disk asks of its world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple


class DiskFaults(NamedTuple):
    """What may go wrong. The first five are in one of so many calls, by a draw that is 0 modulo the number; 0: in none.

    errors: EIO of writes and of changes of names. slow: calls take up to `most_slow_ns`. bit_rot: a bit of the medium
    has turned over when the file is opened. capacity: bytes of all files. unreadable: files that nobody may open.
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
    """What a disk asks of its world. As it is here, nothing goes wrong and no time goes by.

    faults: how often each has happened.
    """

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()

    def unix_ns(self) -> int:
        """The host's wall clock."""
        return 0

    def draw(self, what: str, number: int) -> int:
        """Any number of 0 and more, the same for the same arguments. 1 keeps a fault from happening."""
        return 1

    def fault(self, what: str, number: int) -> None:
        """One has happened, by the draw of this name and number where there was one."""
        self.faults[what] += 1

    def spend(self, ns: int) -> None:
        """The call that has just begun takes so long."""

    def before_call(self, process: str, name: str, path: Path) -> bool:
        """May raise what ends the process before the call. True: `after_call` will raise that, and only half is done:
        of a write a part of the content, of `make_folders` one folder, else all."""
        return False

    def after_call(self, process: str, name: str, path: Path) -> None:
        """The call has come to its end, or to an error. May raise what ends the process."""
