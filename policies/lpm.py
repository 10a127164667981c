"""Longest prefix match first (SGLang's cache-aware scheduling, 2023), aged so that none starves."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, ClassVar

from msgspec import Meta

from eventlm.core.plugin import Policy, SequenceView
from eventlm.types import NANOSECONDS_PER_SECOND


class Lpm(Policy, frozen=True, kw_only=True):
    """Longest prefix match: the sequence with most tokens cached goes first, and waiting counts like cached tokens.

    All age alike, so a sequence that arrived t seconds later goes first only with t x `ageing_tokens_per_s` more tokens
    cached: none is overtaken by arrivals later than the context's length divided by that. None is evicted for another,
    because that would discard computed tokens to save some.
    """

    #: Cached tokens that a second of waiting is worth.
    ageing_tokens_per_s: Annotated[int, Meta(ge=1)] = 250

    reads_prefixes: ClassVar[bool] = True

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        # Minus (cached tokens + those that the wait is worth), without the term that all have in common: now.
        rate = self.ageing_tokens_per_s
        return [s.arrival_ns * rate // NANOSECONDS_PER_SECOND - s.cached_tokens for s in sequences]
