"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import ClassVar

from eventlm.core.plugin import Policy, SequenceView


class Fcfs(Policy, frozen=True, kw_only=True):
    """First come, first served: within one priority the earlier arrival goes first. Nothing is evicted."""

    static: ClassVar[bool] = True

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        return [sequence.arrival_ns for sequence in sequences]
