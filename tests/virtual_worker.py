"""A worker process of `tests.simulation`: it computes nothing, and takes the time that it would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from eventlm.core.shards import Layout
from eventlm.engine.engine_core import EngineCore
from eventlm.events import Desynced, Launched, WorkerLost, WorkerUp
from eventlm.worker.fake.runner import FakeDeath, FakeRunner
from eventlm.worker.fake.tokens import draw
from eventlm.worker.protocol import StepPayload, StepResult
from tests.workload import MILLISECOND, Machine


class World(Protocol):
    """What a worker sees of the simulation that it is part of. Times are in nanoseconds."""

    rng: random.Random
    machine: Machine
    now_ns: int
    engine_core: EngineCore

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time."""

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later."""


class VirtualWorker:
    """A replica's worker processes in virtual time: a fake runner that does one step after the other. Each goes through
    all stages, which takes as long in each.
    """

    def __init__(self, simulation: World, replica: int, machine: Machine | None = None) -> None:
        self.simulation = simulation
        self.replica = replica
        #: Of its replicaset.
        self.machine = machine or simulation.machine
        self.epoch = 0
        self.layout = Layout(stages=self.machine.core.stages, groups=self.machine.core.groups)
        self.runner: FakeRunner | None = None
        #: When each stage can begin another step.
        self.free_ns = [0] * self.layout.stages
        #: By stage: the steps that it was given, and from when until when it has each in hand.
        self._in_hand: list[list[tuple[int, int, int]]] = [[] for _ in self.free_ns]
        #: After its death, whether results that it had sent before still arrive.
        self.is_heard = True

    def start(self) -> None:
        """Come up with a new epoch and an empty cache."""
        core = self.machine.core
        self.epoch += 1
        self.is_heard = True
        self.runner = FakeRunner(
            self.machine.fake,
            epoch=self.epoch,
            block_size=core.block_size,
            num_blocks=core.num_blocks * core.groups,
            state_slots=core.state_slots or 0,
        )
        self.free_ns = [self.simulation.now_ns] * self.layout.stages
        self._in_hand = [[] for _ in self.free_ns]
        self.simulation.engine_core.put_fact(WorkerUp(replica=self.replica, epoch=self.epoch))

    def step(self, launched: Launched, payload: StepPayload) -> None:
        """Take a step; its result comes when it is done. Dead workers say nothing."""
        if self.runner is None or launched.epoch != self.epoch:
            return
        try:
            done = self.runner.execute(launched, payload)
        except FakeDeath:
            self._die()
            self.simulation.after(
                MILLISECOND, lambda epoch=self.epoch, step=launched.step: self.report_lost(epoch, step)
            )
            return
        taken_ns = sum(done.ops.values())
        stages: list[tuple[int, int]] = []
        came_ns = self.simulation.now_ns
        for stage, free_ns in enumerate(self.free_ns):
            start_ns = max(came_ns, free_ns)
            came_ns = self.free_ns[stage] = start_ns + taken_ns
            stages.append((start_ns, came_ns))
            self._in_hand[stage].append((launched.step, start_ns, came_ns))
        result = StepResult(
            epoch=launched.epoch,
            step=launched.step,
            start_ns=stages[0][0],
            end_ns=came_ns,
            tokens=done.tokens,
            ends=done.ends,
            extras=done.extras,
            stages=stages if len(stages) > 1 else [],
        )
        self.simulation.at(came_ns, lambda: self._report(result))

    def _report(self, result: StepResult) -> None:
        if result.epoch < self.epoch or self.is_heard:
            self.simulation.engine_core.complete(
                self.replica, result, start_ns=result.start_ns, end_ns=result.end_ns, stages=result.stages
            )

    def kill(self) -> None:
        """Die between or in the middle of steps."""
        if self.runner is not None:
            self._die()
            now_ns, stage = self.simulation.now_ns, self.layout.place_of(self._lost_rank(self.epoch)).stage
            in_hand = [step for step, start_ns, end_ns in self._in_hand[stage] if start_ns <= now_ns < end_ns]
            self.report_lost(self.epoch, *in_hand)

    def orphan(self) -> None:
        """Its engine is gone."""
        self.runner = None
        self.is_heard = False

    def _lost_rank(self, epoch: int) -> int:
        """Which rank dies in an epoch. It is no business of what else is drawn."""
        return draw("rank", self.replica, epoch) % self.layout.num_ranks

    def _die(self) -> None:
        self.runner = None
        self.is_heard = self.simulation.rng.random() < 0.5

    def report_lost(self, epoch: int, step: int = -1) -> None:
        """The engine has noticed; another worker starts a little later. step: the one that the lost rank had in hand,
        which is known of several.
        """
        simulation = self.simulation
        rank, step = (self._lost_rank(epoch), step) if self.layout.num_ranks > 1 else (-1, -1)
        if simulation.rng.random() < 0.3:
            simulation.engine_core.put_fact(Desynced(replica=self.replica, epoch=epoch, step=0, rank=rank))
        simulation.engine_core.put_fact(
            WorkerLost(replica=self.replica, epoch=epoch, reason="killed", rank=rank, step=step)
        )
        simulation.after(simulation.rng.randint(1, 20) * MILLISECOND, self.start)
