"""A bug that is planted to show that the invariants of a world find it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.world.invariants.checks import BrokenInvariant
from tests.world.machine.world import StuckError
from tests.world.plans.plan import Plan, draw_plan
from tests.world.run import run_plan


class Planted(NamedTuple):
    """A bug to plant. what: the bug, in a sentence. found_by: invariants that may be the first to find it; `stuck` if
    the run waits in vain. plant: a context in which the bug is present. draw: gives the plan of a seed.
    """

    what: str
    found_by: tuple[str, ...]
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    draw: Callable[[int], Plan] = draw_plan

    def find(self, seed: int) -> str:
        """The name of the invariant by which a seed finds the bug; empty if none does."""
        with self.plant():
            try:
                run_plan(self.draw(seed))
            except BrokenInvariant as error:
                return error.name
            except StuckError:
                return "stuck"
        return ""
