"""Shortest prompt first, with ageing. It has a bug, which docs/scheduling-bug.md finds."""

from eventlm.core.plugin import Policy


class Aging(Policy, frozen=True, kw_only=True):
    """The shortest prompt first; after `patience_ms` a request goes before all that have waited less."""

    patience_ms: int = 2_000

    def keys(self, sequences, now_ns):
        """One integer for each sequence; the smallest is the most urgent."""
        patience_ns = self.patience_ms * 1_000_000
        keys = []
        for sequence in sequences:
            waited_ns = now_ns - sequence.arrival_ns
            keys.append(waited_ns if waited_ns > patience_ns else sequence.prompt_tokens)
        return keys
