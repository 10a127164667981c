"""Cost models: how long a simulated worker takes for a step.

A cost model is a small struct that a TOML file can hold. It gives the duration of a step from its shape, and the
overheads around steps.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Protocol

from msgspec import Meta, Struct, structs

from eventlm.core.predictor import NotNegative, Predictor, StepShape
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.cost.group_work import GroupWork

MILLION = 1_000_000
Positive = Annotated[int, Meta(ge=1)]
_MASK = (1 << 64) - 1
#: Later than all times.
MAX_NS = 1 << 62


class Overheads(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times around a step in ns. dispatch: from the launch to the start in an idle worker; between: from the end of a
    step to the start of one that was already queued; report: from the end until the completion is applied; hand_over:
    from the end of a stage of a pipeline to the start of the next one, if that is idle.

    stalls: (from, to), disjoint periods of the run in order in which completions were late: one that is due in such a
    period is applied at its end. A worker may run out of work in the meantime, which no mean would show.
    """

    dispatch_ns: NotNegative = 0
    between_ns: NotNegative = 0
    report_ns: NotNegative = 0
    hand_over_ns: NotNegative = 0
    stalls: list[tuple[int, int]] = []

    def completed_ns(self, end_ns: int) -> int:
        """When the completion of a step that ended at `end_ns` is applied."""
        due_ns = end_ns + self.report_ns
        stalls = self.stalls
        if stalls:
            index = bisect_right(stalls, (due_ns, MAX_NS)) - 1
            if index >= 0:
                due_ns = max(due_ns, stalls[index][1])
        return due_ns


class CostModel(Protocol):
    """Durations of steps. The same arguments give the same duration, in any process."""

    @property
    def overheads(self) -> Overheads:
        """The times around a step."""
        ...

    def in_parts(self, num_stages: int, num_groups: int) -> CostModel:
        """The same work in so many stages and KV groups. Raises UsageError if the model does not say what it costs."""
        ...

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """Duration of step number `step` of a replica if it begins at `start_ns` of the run; at least 1. In a pipeline
        that of the slowest stage.
        """
        ...

    def stages_ns(self, work: GroupWork, replica: int, step: int, start_ns: int = 0) -> list[int]:
        """The same of each stage for what one KV group computes; one stage if there is no pipeline."""
        ...

    def hand_over_ns(self, shape: StepShape) -> int:
        """From the end of a stage to the start of the next one, if that is idle."""
        ...


class LinearCost(Predictor, frozen=True, kw_only=True, tag="linear", forbid_unknown_fields=True):
    """The predictor's linear model, `first_chunk_ps` for the first chunk of a step whatever its length, and noise.

    ratios_ppm: measured over predicted durations, all equally likely. A step draws one by a hash of (seed, replica,
    step). slowness_ppm: the same ratio for periods of the run of `slowness_window_ns` each, beginning at
    `slowness_start_ns`; none outside. Both are in parts per million; empty: none.

    stages_ppm: of a pipeline, each stage's part of the duration, which is that of the slowest; empty: one stage.
    groups: KV groups of the run that it was fitted to. What they exchange is in the coefficients.
    """

    first_chunk_ps: NotNegative = 0
    ratios_ppm: list[Positive] = []
    seed: int = 0
    slowness_ppm: list[Positive] = []
    slowness_start_ns: NotNegative = 0
    slowness_window_ns: Positive = 1
    stages_ppm: list[Positive] = []
    groups: Positive = 1
    overheads: Overheads = Overheads()

    def in_parts(self, num_stages: int, num_groups: int) -> LinearCost:
        """The same work in so many stages, each of which takes as long: the time of all stages is kept. Raises
        UsageError for another number of groups.
        """
        if num_groups != self.groups:
            raise UsageError(
                f"{counted(num_groups, 'KV group')}: a linear cost model of {self.groups} does not say what that saves "
                "and exchanges; take a roofline model"
            )
        if num_stages == (len(self.stages_ppm) or 1):
            return self
        of_all_ppm = sum(self.stages_ppm) or MILLION
        parts = {
            name: getattr(self, name) * of_all_ppm // (MILLION * num_stages)
            for name in (*Predictor.__struct_fields__, "first_chunk_ps")
        }
        return structs.replace(self, **parts, stages_ppm=[MILLION] * num_stages if num_stages > 1 else [])

    def without_noise(self) -> LinearCost:
        """Durations by the shape alone."""
        return structs.replace(self, ratios_ppm=[], slowness_ppm=[])

    def step_ns(self, shape: StepShape, replica: int, step: int, start_ns: int = 0) -> int:
        """A linear function of the shape, times the ratio drawn for the step and the slowness of its period."""
        picoseconds = self.step_ps(shape)
        if shape.num_chunks:
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

    def stages_ns(self, work: GroupWork, replica: int, step: int, start_ns: int = 0) -> list[int]:
        """The step's duration, in parts as the stages have them."""
        slowest_ns = self.step_ns(work.shape, replica, step, start_ns)
        return [max(slowest_ns * share // MILLION, 1) for share in self.stages_ppm] or [slowest_ns]

    def hand_over_ns(self, shape: StepShape) -> int:
        """As the overheads say, whatever the shape."""
        return self.overheads.hand_over_ns


def draw(seed: int, replica: int, step: int) -> int:
    """A 64-bit hash of three integers, evenly spread (SplitMix64's finalizer)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + replica * 0xD1B54A32D192ED03 + step * 0x8CB92BA72F3D8DD7) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
