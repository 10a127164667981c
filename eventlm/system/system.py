"""All that a program takes from its host, in one value."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.system.chance import Chance, SystemChance
from eventlm.system.clock import Clock, SystemClock


class System(NamedTuple):
    """A host's clock and chance."""

    clock: Clock
    chance: Chance


def real_system() -> System:
    """This host."""
    return System(SystemClock(), SystemChance())
