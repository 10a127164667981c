"""Earliest deadline first (Liu and Layland, 1973), with deadlines derived from the prompt where a request has none."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, ClassVar

from msgspec import Meta

from eventlm.core.plugin import Policy, SequenceView, milliseconds_to_ns
from eventlm.types import parts_per_million


class Edf(Policy, frozen=True, kw_only=True):
    """Earliest deadline first: the request's own deadline, else a multiple of its predicted prefill time."""

    multiplier: Annotated[float, Meta(gt=0)] = 1.5
    min_deadline_ms: Annotated[float, Meta(ge=1)] = 500
    #: A waiting sequence evicts a running one whose deadline is this much later.
    evict_margin_ms: Annotated[float, Meta(ge=0)] = 10_000

    static: ClassVar[bool] = True

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        multiplier = parts_per_million(self.multiplier)
        shortest = milliseconds_to_ns(self.min_deadline_ms)
        return [s.arrival_ns + s.relative_deadline_ns(multiplier, shortest) for s in sequences]

    def eviction_margin(self) -> int | None:
        return milliseconds_to_ns(self.evict_margin_ms)
