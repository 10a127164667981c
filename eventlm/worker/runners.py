"""What a worker process computes steps with: a checkpoint on a CPU or a GPU, or the fake model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from eventlm.events import Launched
from eventlm.worker.fake.model import FakeModel
from eventlm.worker.protocol import FAKE_MODEL, StepPayload, StepSample, WorkerSetup
from eventlm.worker.runner import Runner, StepUnderWay
from eventlm.worker.start_report import LOADING_LIBRARIES, MEASURING_STEPS, StartReport

if TYPE_CHECKING:
    # Torch takes a second to import, and the fake model needs none.
    from eventlm.worker.gpu.runner import GpuRunner
    from eventlm.worker.model_runner import ModelRunner


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


def make_runner(setup: WorkerSetup, report: StartReport) -> Runner:
    """Of the model that is asked for. Raises EventLMError if it cannot be loaded."""
    return FakeModel(setup) if setup.model == FAKE_MODEL else CheckpointModel(setup, report)
