"""The steps of a recorded run, each with its shape and times: what a cost model is fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from eventlm.core.predictor import StepShape
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Event, Header, Launched, Snapshot, StepCompleted
from eventlm.replay.cost.group_work import WorkOfSteps, most_of, shape_of


class RecordedStep(NamedTuple):
    """A completed step: launched at `launched_ns`, computed from `start_ns` to `end_ns`. Its completion was applied at
    `completed_ns` as event `s`. stages: of a pipeline, the (start_ns, end_ns) of each stage. shape: of several KV
    groups, that of the one with most to do.
    """

    replica: int
    epoch: int
    step: int
    shape: StepShape
    launched_ns: int
    start_ns: int
    end_ns: int
    completed_ns: int
    s: int
    stages: Sequence[tuple[int, int]] = ()

    @property
    def duration_ns(self) -> int:
        """How long it took; of a pipeline its slowest stage, which waits for no other."""
        return max((end_ns - start_ns for start_ns, end_ns in self.stages), default=self.end_ns - self.start_ns)

    @property
    def freed_ns(self) -> int:
        """When the next step could start: once the first stage was through with it."""
        return self.stages[0][1] if self.stages else self.end_ns


class StepCollector:
    """Takes the events of a log in order. Ignores completions whose launch is not in it."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self._launches: dict[int, tuple[Launched, StepShape]] = {}
        #: Of a run with several KV groups.
        self._work: WorkOfSteps | None = None

    def apply(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Launched):
            self._launches[event.s] = event, self._shape(event)
        elif isinstance(event, Header):
            cores = event.cores_of_replicas()
            self._work = self._work or (WorkOfSteps(cores) if any(core.groups > 1 for core in cores) else None)
        elif isinstance(event, Snapshot) and self._work is not None:
            self._work.resume(msgspec.json.decode(event.state, type=StateSnapshot))
        elif isinstance(event, StepCompleted):
            found = self._launches.pop(event.c, None)
            if found is not None:
                launched, shape = found
                self.steps.append(
                    RecordedStep(
                        replica=event.replica,
                        epoch=event.epoch,
                        step=event.step,
                        shape=shape,
                        launched_ns=launched.ts,
                        start_ns=event.start_ns,
                        end_ns=event.end_ns,
                        completed_ns=event.ts,
                        s=event.s,
                        stages=event.stages,
                    )
                )

    def _shape(self, launched: Launched) -> StepShape:
        if self._work is None:
            return shape_of(launched)
        return most_of(self._work.of(launched))


def by_set(header: Header, steps: Iterable[RecordedStep]) -> list[list[RecordedStep]]:
    """Steps by the replicaset whose replica took them."""
    found: list[list[RecordedStep]] = [[] for _ in header.sets]
    sets = header.sets_of_replicas()
    for step in steps:
        found[sets[step.replica]].append(step)
    return found


class RecordedShapes:
    """Step shapes that a run has covered; beyond them a fitted cost model extrapolates.

    A shape is inside if a recorded step has prefill tokens, decodes and context tokens within one power of two of it,
    and prefill tokens and decodes exactly where it has.
    """

    def __init__(self, shapes: Iterable[StepShape]) -> None:
        self._bins: set[tuple[int, ...]] = set()
        for lengths in {_bin(shape): None for shape in shapes}:
            self._bins.update(product(*map(_neighbours, lengths)))

    def is_inside(self, shape: StepShape) -> bool:
        """Whether the run has similar steps."""
        return _bin(shape) in self._bins


def _bin(shape: StepShape) -> tuple[int, int, int]:
    return shape.prefill_tokens.bit_length(), shape.num_decodes.bit_length(), shape.context_tokens.bit_length()


def _neighbours(length: int) -> tuple[int, ...]:
    """Zero is similar to zero only."""
    return (max(length - 1, 1), length, length + 1) if length else (0,)
