"""What may go wrong with the start of a child process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from tests.world.machine.process import Child, Process

StartFault = Literal["refused", "exits", "killed", "late", "says wrong hello"]
#: Runs in a process that was spawned, with its arguments. child: what its parent sees of it.
Program = Callable[[Process, Child, Sequence[str]], None]


class SpawnFaults(NamedTuple):
    """One of so many children that run a module has a start with a fault, by a draw; 0: none. module: empty for any."""

    one_in: int = 0
    module: str = ""

    def fault_of(self, module: str, drawn: int) -> StartFault | None:
        """The fault of one."""
        if not self.one_in or self.module not in ("", module) or drawn % self.one_in:
            return None
        kinds: tuple[StartFault, ...] = get_args(StartFault)
        return kinds[drawn // self.one_in % len(kinds)]


class Module(NamedTuple):
    """What a module runs, and what says a wrong hello in its place."""

    run: Program
    say_wrong: Program
