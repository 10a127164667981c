"""How long a step takes: a linear model with integer coefficients.

    picoseconds = base
                + prefill      x prefill tokens of the step
                + decode       x decoding sequences
                + context      x context tokens that attention reads, over all rows
                + chunk_context x sum over chunks of (tokens x mean context)

In a pipeline that is the time of its slowest stage: as often a step leaves it.

The features are those of chunked prefill mixed with decodes (Sarathi-Serve, OSDI 2024; Vajra's execution-time model).
"""

from __future__ import annotations

from math import isqrt
from typing import Annotated

from msgspec import Meta, Struct

from eventlm.config.core import MAX_NUMBER
from eventlm.errors import UsageError
from eventlm.types import ceil_div

NUM_COEFFICIENTS = 5
NotNegative = Annotated[int, Meta(ge=0)]
PICOSECONDS_PER_NANOSECOND = 1000
#: 2 ms a step, 40 us a prefill token, 100 us a decode, 20 ns a context token, 1 ns a token pair: a small CPU model.
DEFAULT_COEFFICIENTS = (2_000_000_000, 40_000_000, 100_000_000, 20_000, 1_000)


class StepShape(Struct):
    """What a step computes, in tokens and sequences: the features of the model, and the number of chunks."""

    prefill_tokens: int = 0
    num_decodes: int = 0
    context_tokens: int = 0
    chunk_context: int = 0
    num_chunks: int = 0

    def add_chunk(self, start: int, num_tokens: int, own_tokens: int | None = None) -> None:
        """Account for a prefill chunk of `num_tokens` after `start` tokens of context.

        own_tokens: how many of its own tokens the chunk attends to; by default all.
        """
        own_tokens = num_tokens if own_tokens is None else own_tokens
        self.prefill_tokens += num_tokens
        self.context_tokens += start + own_tokens
        self.chunk_context += num_tokens * (start + own_tokens // 2)
        self.num_chunks += 1


class Predictor(Struct, frozen=True):
    """Coefficients in picoseconds a unit, none negative."""

    base_ps: NotNegative
    prefill_ps: NotNegative = 0
    decode_ps: NotNegative = 0
    context_ps: NotNegative = 0
    chunk_context_ps: NotNegative = 0

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
        return [self.base_ps, self.prefill_ps, self.decode_ps, self.context_ps, self.chunk_context_ps]

    def step_ps(self, shape: StepShape) -> int:
        """Predicted duration of a step, in picoseconds."""
        return (
            self.base_ps
            + self.prefill_ps * shape.prefill_tokens
            + self.decode_ps * shape.num_decodes
            + self.context_ps * shape.context_tokens
            + self.chunk_context_ps * shape.chunk_context
        )

    def chunk_ps(self, start: int, num_tokens: int) -> int:
        """What a chunk of `num_tokens` after `start` tokens of context adds to a step."""
        pairs = num_tokens * (start + num_tokens // 2)
        return self.prefill_ps * num_tokens + self.context_ps * (start + num_tokens) + self.chunk_context_ps * pairs

    def tokens_within(self, spare_ps: int, start: int, max_tokens: int) -> int:
        """Most tokens of a chunk after `start`, up to `max_tokens`, that add at most `spare_ps` to a step which reads
        the `start` tokens already.

        n tokens add linear x n + quadratic x n x floor(n / 2), so the largest n for n^2 / 2 is it, or an odd one more.
        """
        if spare_ps < 0:
            return 0
        linear = self.prefill_ps + self.context_ps + self.chunk_context_ps * start
        quadratic = self.chunk_context_ps
        if not quadratic:
            return min(spare_ps // linear, max_tokens) if linear else max_tokens
        n = (isqrt(linear * linear + 2 * quadratic * spare_ps) - linear) // quadratic
        more = n + 1
        if linear * more + quadratic * more * (more // 2) <= spare_ps:
            n = more
        return min(n, max_tokens)

    def prefill_ns(self, num_tokens: int, done_tokens: int, max_chunk_tokens: int, num_stages: int = 1) -> int:
        """Time to prefill what is left of `num_tokens` alone, in chunks of at most `max_chunk_tokens`.

        The chunks follow each other through the stages, so the longest, which is the last whole one, is waited for in
        each of them.
        """
        left = num_tokens - done_tokens
        if left <= 0:
            return 0
        num_steps = ceil_div(left, max_chunk_tokens)
        taken_ps = (
            self.base_ps * num_steps
            + self.prefill_ps * left
            + self.context_ps * num_tokens * num_steps
            + self.chunk_context_ps * left * (done_tokens + left // 2)
        )
        if num_stages > 1:
            longest = min(left, max_chunk_tokens)
            taken_ps += (num_stages - 1) * (self.base_ps + self.chunk_ps(num_tokens - longest, longest))
        return taken_ps // PICOSECONDS_PER_NANOSECOND
