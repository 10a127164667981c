"""What a worker process computes steps with: a checkpoint on a CPU or a GPU, or the fake model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from eventlm.events import Launched
from eventlm.worker.fake.runner import FakeDeath, FakeParameters, FakeRunner
from eventlm.worker.protocol import FAKE_MODEL, StepOutput, StepPayload, StepSample, WorkerSetup
from eventlm.worker.start_report import LOADING_LIBRARIES, MEASURING_STEPS, StartReport

if TYPE_CHECKING:
    # Torch takes a second to import, and the fake model needs none.
    from eventlm.worker.gpu.runner import GpuRunner
    from eventlm.worker.model_runner import ModelRunner


class StepUnderWay(Protocol):
    """A launch that was begun."""

    def is_done(self) -> bool:
        """Whether `finish` need not wait."""
        ...

    def finish(self) -> StepOutput:
        """What it gave. Waits for it."""
        ...

    @property
    def times_ns(self) -> tuple[int, int]:
        """When it began and ended, on this machine's monotonic clock, once it is finished."""
        ...


class Runner(Protocol):
    """What computes steps."""

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """Begin to compute every row of a launch, those before it being done or under way. Raises DesyncError."""
        ...

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Done when the grammar's matcher is built; raises GrammarError if that cannot be."""
        ...

    def warm_up(self) -> list[StepSample]:
        """Measured steps of several shapes, in at most 2 s."""
        ...

    def work_ahead(self) -> bool:
        """Called while no step is there: do for a moment what would cost later steps time. False if nothing is left."""
        ...

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Fingerprint of the model, and what a trace says of the machinery."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that it has."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the log should have of its start."""
        ...


class ExecutedStep:
    """A launch that a runner computes at once."""

    def __init__(self, execute: Callable[[], StepOutput]) -> None:
        start_ns = time.monotonic_ns()
        self._output = execute()
        self.times_ns = (start_ns, time.monotonic_ns())

    def is_done(self) -> bool:
        """It is."""
        return True

    def finish(self) -> StepOutput:
        """What it gave."""
        return self._output


class FakeStep(NamedTuple):
    """A launch that the fake device computes while the worker goes on."""

    output: StepOutput
    times_ns: tuple[int, int]

    def is_done(self) -> bool:
        """Whether its time is over."""
        return time.monotonic_ns() >= self.times_ns[1]

    def finish(self) -> StepOutput:
        """What it gave. Sleeps for what is left of its time."""
        time.sleep(max(self.times_ns[1] - time.monotonic_ns(), 0) / 1e9)
        return self.output


class FakeModel:
    """The fake worker in real time: a device that computes one launch after the other, each as long as it says, and
    dies when it is drawn to.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._profile_ops = setup.profile_ops
        self._runner = FakeRunner(
            setup.fake, epoch=setup.epoch, block_size=setup.block_size, num_blocks=setup.num_blocks
        )
        self.num_blocks = setup.num_blocks
        self.notes: list[str] = []
        #: When the device will have done all that it was given.
        self._free_ns = 0

    def start(self, launch: Launched, payload: StepPayload) -> FakeStep:
        """Behind what is under way."""
        begun_ns = time.monotonic_ns()
        try:
            step = self._runner.execute(launch, payload)
        except FakeDeath as death:
            print(f"fake worker: {death}", file=sys.stderr)
            os._exit(1)
        start_ns = max(begun_ns, self._free_ns)
        self._free_ns = start_ns + step.duration_ns
        output = StepOutput(step.tokens, step.ends, step.extras, step.ops if self._profile_ops else {})
        return FakeStep(output, (start_ns, self._free_ns))

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Over the fake model's bytes."""
        from eventlm.worker.fake.grammar import fake_compiler

        return fake_compiler().prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """The formula's own values at a few points."""
        return fake_samples(self._runner.parameters)

    def work_ahead(self) -> bool:
        """There is nothing to do."""
        return False

    def describe(self) -> tuple[str, dict[str, Any]]:
        """There is no model."""
        return FAKE_MODEL, {"device": "none"}


class CheckpointModel:
    """A checkpoint on a torch device. Imports torch, which takes a second."""

    def __init__(self, setup: WorkerSetup, report: StartReport) -> None:
        self._report = report
        report.begin(LOADING_LIBRARIES)
        from eventlm.models.config import model_fingerprint

        self._runner: ModelRunner | GpuRunner
        if setup.device == "cpu":
            from eventlm.worker.model_runner import ModelRunner

            self._runner = ModelRunner(setup, report)
        else:
            from eventlm.worker.gpu.runner import GpuRunner

            self._runner = GpuRunner(setup, report)
        self.num_blocks = self._runner.num_blocks
        self.notes = self._runner.notes
        self._fingerprint = model_fingerprint(setup.model)
        self._tokenizer = setup.tokenizer

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """Run the model."""
        return self._runner.start(launch, payload)

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Over the checkpoint's vocabulary."""
        return self._runner.compiler.prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """Time real steps."""
        from eventlm.worker.warm_up import warm_up

        self._report.begin(MEASURING_STEPS)
        return warm_up(self._runner)

    def work_ahead(self) -> bool:
        """Have memory given."""
        return self._runner.work_ahead()

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Fingerprint and host."""
        other_tokenizer = {"tokenizer": self._tokenizer} if self._tokenizer else {}
        return self._fingerprint, self._runner.host_info() | other_tokenizer


def fake_samples(parameters: FakeParameters) -> list[StepSample]:
    """What a warm-up of the fake worker would measure."""
    shapes = [(1, 0, 1), (256, 0, 256), (0, 1, 64), (0, 64, 64), (0, 64, 65_536), (1024, 0, 1024)]
    return [
        StepSample(
            prefill_tokens=prefill,
            num_decodes=decodes,
            context_tokens=context,
            chunk_context=prefill * (prefill // 2),
            duration_ns=parameters.base_ns
            + parameters.prefill_token_ns * prefill
            + parameters.decode_ns * decodes
            + parameters.context_token_ns * context,
        )
        for prefill, decodes, context in shapes
    ]


def make_runner(setup: WorkerSetup, report: StartReport) -> Runner:
    """Of the model that is asked for. Raises EventLMError if it cannot be loaded."""
    return FakeModel(setup) if setup.model == FAKE_MODEL else CheckpointModel(setup, report)
