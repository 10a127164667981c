"""How long a step takes: a linear model with integer coefficients.

    picoseconds = base
                + prefill      x prefill tokens of the step
                + decode       x decoding sequences
                + context      x context tokens that attention reads, over all rows
                + chunk_context x sum over chunks of (tokens x mean context)

The features are those of chunked prefill mixed with decodes (Sarathi-Serve, OSDI 2024; Vajra's execution-time model).
"""

from __future__ import annotations

from msgspec import Struct

from eventlm.errors import UsageError
from eventlm.types import ceil_div

NUM_COEFFICIENTS = 5
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
        """Raises UsageError if there are not exactly five non-negative integers."""
        if len(coefficients) != NUM_COEFFICIENTS or any(value < 0 for value in coefficients):
            raise UsageError(
                f"a predictor has {NUM_COEFFICIENTS} non-negative integer coefficients, got {list(coefficients)}"
            )
        return cls(*coefficients)

    def coefficients(self) -> list[int]:
        """The five numbers in their order."""
        return [self.base, self.prefill, self.decode, self.context, self.chunk_context]

    def step_ns(self, *, prefill_tokens: int, num_decodes: int, context_tokens: int, chunk_context: int) -> int:
        """Predicted duration of a step with these features."""
        return (
            self.base
            + self.prefill * prefill_tokens
            + self.decode * num_decodes
            + self.context * context_tokens
            + self.chunk_context * chunk_context
        ) // 1000

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
        ) // 1000
