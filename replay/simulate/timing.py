"""Times of a simulated worker's steps: from a cost model, or as in a recorded run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

from msgspec import Struct

from eventlm.config import CoreConfig
from eventlm.core.predictor import StepShape
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Launched, ReplicasetRecord
from eventlm.replay.cost.backend_model import AnyCost, BackendsCost
from eventlm.replay.cost.group_work import WorkOfSteps, most_of
from eventlm.replay.cost.model import CostModel
from eventlm.replay.cost.recorded_steps import RecordedStep
from eventlm.replay.simulate.backends import ModelledBackend


class StepTimes(Struct, frozen=True):
    """Start and end in the worker, when the completion is applied, and its rank among facts of that time. stages: of a
    pipeline, the (start_ns, end_ns) of each stage.
    """

    start_ns: int
    end_ns: int
    completed_ns: int
    rank: int
    stages: Sequence[tuple[int, int]] = ()


class SetTiming(NamedTuple):
    """What the steps of a replicaset cost, or a model of the servers that it is; and its limits."""

    cost: AnyCost
    core: CoreConfig


def timings(sets: Sequence[ReplicasetRecord], costs: Sequence[AnyCost]) -> list[SetTiming]:
    """Those of replicasets, each with its cost model in the stages and KV groups that it has. Raises UsageError if a
    model does not say what these cost.
    """
    return [
        SetTiming(
            cost if isinstance(cost, BackendsCost) else cost.in_parts(each.core.stages, each.core.groups), each.core
        )
        for each, cost in zip(sets, costs, strict=True)
    ]


class Timing(Protocol):
    """Step times of all workers."""

    @property
    def fires_timers(self) -> bool:
        """Whether the core's timers fire when they are due; else recorded `timer` facts replace them."""
        ...

    def step(self, launched: Launched) -> StepTimes | None:
        """Times of a step that was just launched; None: it never completes. Called in launch order."""
        ...

    def worker_up(self, replica: int, now_ns: int) -> None:
        """The replica has a new, idle worker."""
        ...

    def backends(self) -> list[ModelledBackend | None]:
        """By replica, the model of the server that it is; None: it has a worker, or facts as recorded."""
        ...


class ModelledTiming:
    """A step starts when its launch has reached the worker and the step before has ended. In a pipeline it goes through
    all stages, each of which has one step at a time. Of several KV groups, a stage waits for the slowest.

    sets: the replicasets, in order. on_shape: gets the replica and the shape of each step. start: the state in which
    the simulation begins, if that is in the middle of a run; before: the steps of that run that were launched by then;
    they take as long as they did.
    """

    fires_timers = True

    def __init__(
        self,
        sets: Sequence[SetTiming],
        *,
        on_shape: Callable[[int, StepShape], None] | None = None,
        start: StateSnapshot | None = None,
        before: Iterable[RecordedStep] = (),
    ) -> None:
        of_replicas = [each for each in sets for _ in range(each.core.num_replicas)]
        #: By replica; None: it is another server, and has no steps.
        self._costs = [None if isinstance(each.cost, BackendsCost) else each.cost for each in of_replicas]
        self._backends: list[ModelledBackend | None] = []
        for each in sets:
            for number in range(each.core.num_replicas):
                cost, look = each.cost, on_shape and partial(on_shape, len(self._backends))
                self._backends.append(
                    ModelledBackend(cost.of(number), cost.seed, look) if isinstance(cost, BackendsCost) else None
                )
        self._work = WorkOfSteps([each.core for each in of_replicas])
        if start is not None:
            self._work.resume(start)
        self._on_shape = on_shape
        #: When each stage of each replica can start the next step; stages that have had none are left out.
        self._free_ns: list[list[int]] = [[] for _ in of_replicas]
        self._before: dict[tuple[int, int, int], RecordedStep] = {}
        for step in before:
            self._before[step.replica, step.epoch, step.step] = step
            ends_ns = [end_ns for _, end_ns in step.stages] or [step.end_ns]
            free_ns, between_ns = self._free_ns[step.replica], self._cost(step.replica).overheads.between_ns
            free_ns[:] = [
                max(end_ns + between_ns, before_ns) for end_ns, before_ns in zip_longest(ends_ns, free_ns, fillvalue=0)
            ]

    def step(self, launched: Launched) -> StepTimes:
        replica = launched.replica
        cost = self._cost(replica)
        overheads = cost.overheads
        works = self._work.of(launched)
        if self._before:
            found = self._before.pop((replica, launched.epoch, launched.step), None)
            if found is not None:
                return StepTimes(found.start_ns, found.end_ns, found.completed_ns, 0, found.stages)
        shape = most_of(works)
        if self._on_shape is not None:
            self._on_shape(replica, shape)
        free_ns = self._free_ns[replica]
        start_ns = max(launched.ts + overheads.dispatch_ns, free_ns[0] if free_ns else 0)
        of_groups = [cost.stages_ns(work, replica, launched.step, start_ns) for work in works]
        taken_ns = of_groups[0] if len(works) == 1 else [max(of_stage) for of_stage in zip(*of_groups, strict=True)]
        hand_over_ns = cost.hand_over_ns(shape) if len(taken_ns) > 1 else 0
        if len(free_ns) < len(taken_ns):
            free_ns += [0] * (len(taken_ns) - len(free_ns))
        stages: list[tuple[int, int]] = []
        arrived_ns = start_ns
        for stage, stage_ns in enumerate(taken_ns):
            begin_ns = max(arrived_ns, free_ns[stage])
            end_ns = begin_ns + stage_ns
            free_ns[stage] = end_ns + overheads.between_ns
            stages.append((begin_ns, end_ns))
            arrived_ns = end_ns + hand_over_ns
        return StepTimes(start_ns, end_ns, overheads.completed_ns(end_ns), 0, stages if len(stages) > 1 else ())

    def worker_up(self, replica: int, now_ns: int) -> None:
        self._free_ns[replica] = [now_ns] * max(len(self._free_ns[replica]), 1)

    def backends(self) -> list[ModelledBackend | None]:
        return self._backends

    def _cost(self, replica: int) -> CostModel:
        cost = self._costs[replica]
        assert cost is not None
        return cost


class RecordedTiming:
    """As recorded; steps that the run does not have never complete."""

    fires_timers = False

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        self._steps = {(step.replica, step.epoch, step.step): step for step in steps}

    def step(self, launched: Launched) -> StepTimes | None:
        found = self._steps.get((launched.replica, launched.epoch, launched.step))
        if found is None:
            return None
        return StepTimes(found.start_ns, found.end_ns, found.completed_ns, found.s, found.stages)

    def worker_up(self, replica: int, now_ns: int) -> None:
        """The times do not depend on it."""

    def backends(self) -> list[ModelledBackend | None]:
        """Their answers are among the recorded facts."""
        return []
