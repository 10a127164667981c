"""When a simulated worker's steps begin and end: by a cost model, or as they did in a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from eventlm.events import Launched
from eventlm.replay.cost.model import CostModel, StepShape, shape_of
from eventlm.replay.cost.recorded_steps import RecordedStep


class StepTimes(NamedTuple):
    """When a step starts and ends in its worker, when its completion is applied, its rank among facts of that time."""

    start_ns: int
    end_ns: int
    completed_ns: int
    rank: int


class Timing(Protocol):
    """The clock of the workers."""

    @property
    def fires_timers(self) -> bool:
        """Whether the core's timers fire when they are due; else they do as the incidents of the run say."""
        ...

    def step(self, launched: Launched) -> StepTimes | None:
        """Times of a step that has just been launched; None: it never completes. In the order of the launches."""
        ...

    def worker_up(self, replica: int, now_ns: int) -> None:
        """A new worker has nothing to do."""
        ...


class ModelledTiming:
    """A step starts as soon as its launch has reached the worker and the step before has ended."""

    fires_timers = True

    def __init__(
        self, cost: CostModel, num_replicas: int, *, on_shape: Callable[[StepShape], None] | None = None
    ) -> None:
        self._cost = cost
        self._on_shape = on_shape
        self._overheads = cost.overheads
        self._free_ns = [0] * num_replicas

    def step(self, launched: Launched) -> StepTimes:
        overheads, replica = self._overheads, launched.replica
        shape = shape_of(launched)
        if self._on_shape is not None:
            self._on_shape(shape)
        start_ns = max(launched.ts + overheads.dispatch_ns, self._free_ns[replica])
        end_ns = start_ns + self._cost.step_ns(shape, replica, launched.step, start_ns)
        self._free_ns[replica] = end_ns + overheads.between_ns
        return StepTimes(start_ns, end_ns, overheads.completed_ns(end_ns), 0)

    def worker_up(self, replica: int, now_ns: int) -> None:
        self._free_ns[replica] = now_ns


class RecordedTiming:
    """As it was. Whoever is asked for what the run does not have answers with nothing."""

    fires_timers = False

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        self._steps = {(step.replica, step.epoch, step.step): step for step in steps}

    def step(self, launched: Launched) -> StepTimes | None:
        found = self._steps.get((launched.replica, launched.epoch, launched.step))
        return None if found is None else StepTimes(found.start_ns, found.end_ns, found.completed_ns, found.s)

    def worker_up(self, replica: int, now_ns: int) -> None:
        """Nothing depends on it."""
