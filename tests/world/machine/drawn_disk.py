"""Surroundings for tests of the disk: one with drawn faults, and one whose process dies."""

from __future__ import annotations

from pathlib import Path

from tests.bus.crashes import Killed
from tests.world.machine.disk_faults import DiskFaults, Surroundings
from tests.world.machine.draws import Draws

ALL_FAULTS = DiskFaults(errors=12, sync_errors=4, short_writes=4, slow=9, bit_rot=4)


class Drawn(Surroundings):
    """Draws the faults. spent_ns: time spent in slow calls; left_out: names and numbers of draws that are left out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.spent_ns = 0
        self.left_out: set[tuple[str, int]] = set()
        self.happened: list[tuple[str, int]] = []
        self.calls: list[str] = []
        self._draws = Draws(seed)

    def unix_ns(self) -> int:
        return len(self.calls)

    def draw(self, what: str, number: int) -> int:
        if (what, number) in self.left_out:
            return 1
        return self._draws.draw(what, number)

    def fault(self, what: str, number: int) -> None:
        super().fault(what, number)
        self.happened.append((what, number))

    def spend(self, ns: int) -> None:
        self.spent_ns += ns

    def before_call(self, process: str, name: str, path: Path) -> bool:
        self.calls.append(name)
        return False


class Mortal(Drawn):
    """Kills the engine at its call with this number: before it, halfway through or after it."""

    def __init__(self, seed: int, call: int, when: str) -> None:
        super().__init__(seed)
        self._call = call
        self._when = when
        self._is_dying = False

    def before_call(self, process: str, name: str, path: Path) -> bool:
        if process != "engine":
            return False
        if not self._is_dying:
            super().before_call(process, name, path)
            self._is_dying = len(self.calls) == self._call
            if not self._is_dying or self._when != "before":
                return self._is_dying and self._when == "halfway"
        # The `finally` blocks of the dying process do not reach the disk either.
        raise Killed

    def after_call(self, process: str, name: str, path: Path) -> None:
        if self._is_dying and process == "engine":
            raise Killed
