"""What a step costs in the place of a worker: a simulator's only source of time.

A cost model is a small struct that a TOML file can hold. It gets the shape of a step and says how long a worker takes
for it; beside it stand the times around a step: how long a launch takes to reach an idle worker, how long a worker
needs between two steps that wait for it, and how long its answer takes to be applied.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, NamedTuple, Protocol

from msgspec import Meta, Struct, structs

from eventlm.events import Launched

MILLION = 1_000_000
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
_MASK = (1 << 64) - 1
#: Behind all times.
MAX_NS = 1 << 62


class StepShape(NamedTuple):
    """What a step computes, in tokens and sequences: the features of `eventlm.core.predictor`, and its chunks."""

    prefill_tokens: int
    num_decodes: int
    context_tokens: int
    chunk_context: int
    num_chunks: int


class Overheads(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times around a step in ns. dispatch: from the launch to the start in an idle worker; between: from the end of a
    step to the start of one that was there already; report: from the end to the completion's being applied.

    stalls: (from, to), stretches of the run's time axis in which completions were late, in order and apart: one that
    is due in a stretch is applied at its end. Meanwhile a worker may run out of work, which no mean shows.
    """

    dispatch_ns: NotNegative = 0
    between_ns: NotNegative = 0
    report_ns: NotNegative = 0
    stalls: list[tuple[int, int]] = []

    def completed_ns(self, end_ns: int) -> int:
        """When the completion of a step is applied that ended at `end_ns`."""
        due_ns = end_ns + self.report_ns
        stalls = self.stalls
        if stalls:
            place = bisect_right(stalls, (due_ns, MAX_NS)) - 1
            if place >= 0:
                due_ns = max(due_ns, stalls[place][1])
        return due_ns


class CostModel(Protocol):
    """Durations of steps. The same arguments give the same duration, in any process."""

    @property
    def overheads(self) -> Overheads:
        """The times around a step."""
        ...

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """How long a worker takes for a step of this shape that begins at `start_ns` of the run; at least 1. `replica`
        and `step` are its name.
        """
        ...


class LinearCost(Struct, frozen=True, kw_only=True, tag="linear", forbid_unknown_fields=True):
    """Picoseconds for a step, a prefill token, a decode, a context token and a token pair, as the predictor has them;
    and for the first chunk of a step, whatever its length.

    ratios_ppm: how much longer than that measured steps took, each value as likely as another. A step draws one by a
    hash of (seed, replica, step). slowness_ppm: the same for stretches of the run, each `slowness_window_ns` long, the
    first from `slowness_start_ns` on; outside there is none. Both are in parts per million; empty: none.
    """

    base_ps: NotNegative
    prefill_ps: NotNegative = 0
    decode_ps: NotNegative = 0
    context_ps: NotNegative = 0
    chunk_context_ps: NotNegative = 0
    first_chunk_ps: NotNegative = 0
    ratios_ppm: list[Positive] = []
    seed: int = 0
    slowness_ppm: list[Positive] = []
    slowness_start_ns: NotNegative = 0
    slowness_window_ns: Positive = 1
    overheads: Overheads = Overheads()

    def without_noise(self) -> LinearCost:
        """What the shape alone says."""
        return structs.replace(self, ratios_ppm=[], slowness_ppm=[])

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """A linear function of the shape, times what is drawn for the step and known of the time."""
        prefill_tokens, num_decodes, context_tokens, chunk_context, num_chunks = shape
        picoseconds = (
            self.base_ps
            + self.prefill_ps * prefill_tokens
            + self.decode_ps * num_decodes
            + self.context_ps * context_tokens
            + self.chunk_context_ps * chunk_context
        )
        if num_chunks:
            picoseconds += self.first_chunk_ps
        ratios = self.ratios_ppm
        if ratios:
            picoseconds = picoseconds * ratios[draw(self.seed, replica, step) * len(ratios) >> 64] // MILLION
        slowness = self.slowness_ppm
        if slowness:
            window = (start_ns - self.slowness_start_ns) // self.slowness_window_ns
            if 0 <= window < len(slowness):
                picoseconds = picoseconds * slowness[window] // MILLION
        return max(picoseconds // 1000, 1)


def draw(seed: int, replica: int, step: int) -> int:
    """A 64-bit hash of three integers, evenly spread (SplitMix64's finalizer)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + replica * 0xD1B54A32D192ED03 + step * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


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
