"""Least remaining slack first, relative to the deadline (Vajra's LRS; Medha, 2024)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated

from msgspec import Meta

from eventlm.core.plugin import Policy, SequenceView, milliseconds_to_ns
from eventlm.types import parts_per_million

#: Keys are fixed-point fractions of a deadline with this many binary digits.
FRACTION_BITS = 20


class Lrs(Policy, frozen=True, kw_only=True):
    """Least remaining slack: the sequence with the smallest share of its deadline to spare goes first."""

    multiplier: Annotated[float, Meta(gt=0)] = 1.5
    min_deadline_ms: Annotated[float, Meta(ge=1)] = 500
    #: A waiting sequence evicts a running one that had this many more deadlines to spare at its admission.
    evict_margin: Annotated[float, Meta(ge=0)] = 8

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        multiplier = parts_per_million(self.multiplier)
        shortest = milliseconds_to_ns(self.min_deadline_ms)
        keys = []
        for s in sequences:
            # `relative_deadline_ns` inlined: this runs for every waiting sequence in every round.
            deadline = s.deadline_ns
            if not deadline:
                deadline = multiplier * s.prefill_ns // 1_000_000
                if deadline < shortest:
                    deadline = shortest
            keys.append(((s.arrival_ns + deadline - now_ns - s.remaining_ns) << FRACTION_BITS) // deadline)
        return keys

    def eviction_margin(self) -> int | None:
        return (parts_per_million(self.evict_margin) << FRACTION_BITS) // 1_000_000
