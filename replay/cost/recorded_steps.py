"""The steps of a recorded run, each with its shape and times: what a cost model is fitted on."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.events import Event, Launched, StepCompleted
from eventlm.replay.cost.model import StepShape, shape_of


class RecordedStep(NamedTuple):
    """A completed step. Its launch was decided at `launched_ns`, its worker took it from `start_ns` to `end_ns`, its
    completion was applied at `completed_ns` as event `s`.
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


class StepCollector:
    """Takes the events of a log in their order. Completions whose launch was not seen are passed over."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self._launches: dict[int, Launched] = {}

    def apply(self, event: Event) -> None:
        """Note a launch, or what became of it."""
        if isinstance(event, Launched):
            self._launches[event.s] = event
        elif isinstance(event, StepCompleted):
            launched = self._launches.pop(event.c, None)
            if launched is not None:
                self.steps.append(
                    RecordedStep(
                        replica=event.replica,
                        epoch=event.epoch,
                        step=event.step,
                        shape=shape_of(launched),
                        launched_ns=launched.ts,
                        start_ns=event.start_ns,
                        end_ns=event.end_ns,
                        completed_ns=event.ts,
                        s=event.s,
                    )
                )
