"""One section of a run: its share of the time, and what it needs."""

from __future__ import annotations

import math
from typing import NamedTuple


class Section(NamedTuple):
    """`seconds` are its share of a run, beside the others'. A part that takes longer than `part_seconds` hangs.
    `needs_ceilings`: its ratios are to what the section `ceilings` measures.
    """

    name: str
    seconds: float
    part_seconds: float = math.inf
    needs_ceilings: bool = True

    @property
    def module(self) -> str:
        """That measures it."""
        return f"benchmarks.gpu_sections.{self.name}"
