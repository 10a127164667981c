"""What a step costs in the place of a worker: a simulator's only source of time.

A cost model is a small struct that a TOML file can hold. It gets the shape of a step and says how long a worker takes
for it; beside it stand the times around a step: how long a launch takes to reach an idle worker, how long a worker
needs between two steps that wait for it, and how long its answer takes to be applied.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec import Struct

from eventlm.events import Launched


class StepShape(NamedTuple):
    """What a step computes, in tokens and sequences: the features of `eventlm.core.predictor`, and its chunks."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int
    chunk_context: int
    num_chunks: int


class Overheads(Struct, frozen=True, kw_only=True):
    """Times around a step in ns. dispatch: from the launch to the start in an idle worker; between: from the end of a
    step to the start of one that was there already; report: from the end to the completion's being applied.
    """

    dispatch_ns: int = 0
    between_ns: int = 0
    report_ns: int = 0


class CostModel(Protocol):
    """Durations of steps. The same arguments give the same duration, in any process."""

    @property
    def overheads(self) -> Overheads:
        """The times around a step."""
        ...

    def step_ns(self, shape: StepShape, replica: int, step: int) -> int:
        """How long a worker takes for a step of this shape; at least 1. `replica` and `step` are its name."""
        ...


class LinearCost(Struct, frozen=True, kw_only=True, tag="linear"):
    """The predictor's own model: picoseconds for a step, a prefill token, a decode, a context token, a token pair."""

    base_ps: int
    prefill_ps: int = 0
    decode_ps: int = 0
    context_ps: int = 0
    chunk_context_ps: int = 0
    overheads: Overheads = Overheads()

    def step_ns(self, shape: StepShape, replica: int, step: int) -> int:
        """A linear function of the shape."""
        picoseconds = (
            self.base_ps
            + self.prefill_ps * shape.prefill_tokens
            + self.decode_ps * shape.num_decodes
            + self.context_ps * shape.context_tokens
            + self.chunk_context_ps * shape.chunk_context
        )
        return max(picoseconds // 1000, 1)


def shape_of(launched: Launched) -> StepShape:
    """The shape of a launch whose decodes take one token each."""
    context_tokens = chunk_context = 0
    for _, _, confirmed, in_flight in launched.decodes:
        context_tokens += confirmed + in_flight
    for _, _, start, num_tokens, _ in launched.chunks:
        context_tokens += start + num_tokens
        chunk_context += num_tokens * (start + num_tokens // 2)
    num_decodes = len(launched.decodes)
    return StepShape(
        launched.num_tokens - num_decodes, num_decodes, context_tokens, chunk_context, len(launched.chunks)
    )
