"""What may go wrong when a child process starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from tests.world.machine.process import Child, Process

StartFault = Literal["refused", "exits", "killed", "late", "says wrong hello"]
#: Runs in a spawned process, with the command-line arguments. child: the process as its parent sees it.
Program = Callable[[Process, Child, Sequence[str]], None]


class SpawnFaults(NamedTuple):
    """Which children fail to start properly: one in `one_in` of those that run `module`; 0: none. module: empty for
    any.
    """

    one_in: int = 0
    module: str = ""

    def fault_of(self, module: str, drawn: int) -> StartFault | None:
        """The fault of one child, from a drawn number; None: it starts properly."""
        if not self.one_in or self.module not in ("", module) or drawn % self.one_in:
            return None
        kinds: tuple[StartFault, ...] = get_args(StartFault)
        return kinds[drawn // self.one_in % len(kinds)]


class Module(NamedTuple):
    """What a child that runs a module does. say_wrong: what it does instead if it is to send a wrong hello."""

    run: Program
    say_wrong: Program
