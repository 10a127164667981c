"""Shortest prompt first, but no request waits longer than `patience_s` while shorter ones go first."""

from typing import ClassVar

from eventlm.core.plugin import Policy


class Shortest(Policy, frozen=True, kw_only=True):
    """The shortest prompt first; after `patience_s` the oldest."""

    patience_s: int = 30

    static: ClassVar[bool] = False  # keys change with time, so they are asked for again in every round

    def keys(self, sequences, now_ns):
        """One integer for each sequence; the smallest is the most urgent."""
        patience_ns = self.patience_s * 1_000_000_000
        return [s.arrival_ns - now_ns if now_ns - s.arrival_ns > patience_ns else s.prompt_tokens for s in sequences]
