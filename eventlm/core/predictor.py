"""How long a step takes: a linear model with integer coefficients.

    picoseconds = base
                + prefill      x prefill tokens of the step
                + decode       x decoding sequences
                + context      x context tokens that attention reads, over all rows
                + chunk_context x sum over chunks of (tokens x mean context)

The features are those of chunked prefill mixed with decodes (Sarathi-Serve, OSDI 2024; Vajra's execution-time model).
"""

from __future__ import annotations

from math import isqrt

from msgspec import Struct

from eventlm.config.core import MAX_NUMBER
from eventlm.errors import UsageError
from eventlm.types import ceil_div

NUM_COEFFICIENTS = 5
PICOSECONDS_PER_NANOSECOND = 1000
#: 2 ms a step, 40 us a prefill token, 100 us a decode, 20 ns a context token, 1 ns a token pair: a small CPU model.
DEFAULT_COEFFICIENTS = (2_000_000_000, 40_000_000, 100_000_000, 20_000, 1_000)


class Predictor(Struct, frozen=True):
    """Coefficients in picoseconds a unit, none negative."""

    base: int
    prefill: int
    decode: int
    context: int
    chunk_context: int

    @classmethod
    def from_coefficients(cls, coefficients: list[int] | tuple[int, ...]) -> Predictor:
        """Raises UsageError if there are not exactly five non-negative integers of 64 bits."""
        if len(coefficients) != NUM_COEFFICIENTS or not all(0 <= value <= MAX_NUMBER for value in coefficients):
            raise UsageError(
                f"a predictor has {NUM_COEFFICIENTS} non-negative integer coefficients below 2^63, got "
                f"{list(coefficients)}"
            )
        return cls(*coefficients)

    def coefficients(self) -> list[int]:
        """The five numbers in their order."""
        return [self.base, self.prefill, self.decode, self.context, self.chunk_context]

    def step_ns(self, *, prefill_tokens: int, num_decodes: int, context_tokens: int, chunk_context: int) -> int:
        """Predicted duration of a step with these features."""
        features = (prefill_tokens, num_decodes, context_tokens, chunk_context)
        return self.step_ps(*features) // PICOSECONDS_PER_NANOSECOND

    def step_ps(self, prefill_tokens: int, num_decodes: int, context_tokens: int, chunk_context: int) -> int:
        """The same in picoseconds."""
        return (
            self.base
            + self.prefill * prefill_tokens
            + self.decode * num_decodes
            + self.context * context_tokens
            + self.chunk_context * chunk_context
        )

    def tokens_within(self, spare_ps: int, start: int, max_tokens: int) -> int:
        """Most tokens of a chunk after `start`, up to `max_tokens`, that add at most `spare_ps` to a step which reads
        the `start` tokens already.

        n tokens add linear x n + quadratic x n x floor(n / 2), so the largest n for n^2 / 2 is it, or an odd one more.
        """
        if spare_ps < 0:
            return 0
        linear = self.prefill + self.context + self.chunk_context * start
        quadratic = self.chunk_context
        if not quadratic:
            return min(spare_ps // linear, max_tokens) if linear else max_tokens
        n = (isqrt(linear * linear + 2 * quadratic * spare_ps) - linear) // quadratic
        more = n + 1
        if linear * more + quadratic * more * (more // 2) <= spare_ps:
            n = more
        return min(n, max_tokens)

    def prefill_ns(self, num_tokens: int, done_tokens: int, max_chunk_tokens: int) -> int:
        """Time to prefill what is left of `num_tokens` alone, in chunks of at most `max_chunk_tokens`."""
        left = num_tokens - done_tokens
        if left <= 0:
            return 0
        num_steps = ceil_div(left, max_chunk_tokens)
        return (
            self.base * num_steps
            + self.prefill * left
            + self.context * num_tokens * num_steps
            + self.chunk_context * left * (done_tokens + left // 2)
        ) // PICOSECONDS_PER_NANOSECOND
