"""What the runners of checkpoints on CPUs and GPUs have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from eventlm.events.decisions import Launched
from eventlm.models.config import model_fingerprint
from eventlm.models.served import read_served
from eventlm.models.transformers_model import TransformersModel
from eventlm.types import WorkerEnd
from eventlm.worker.grammar.compiler import GrammarCompiler
from eventlm.worker.grammar.table import GrammarTable
from eventlm.worker.grammar.vocabulary import checkpoint_vocabulary
from eventlm.worker.protocol import StepOutput, StepPayload, StepSample, WorkerSetup
from eventlm.worker.sequence_table import WorkerSequence, end_of
from eventlm.worker.start_report import MEASURING_STEPS, StartReport
from eventlm.worker.warm_up import warm_up


class CheckpointRunner(ABC):
    """A `Runner` of a checkpoint. Raises CheckpointError if the model cannot be loaded."""

    #: KV blocks that it has.
    num_blocks: int
    #: The KV cache.
    cache: Any

    def __init__(self, setup: WorkerSetup, report: StartReport | None) -> None:
        self.setup = setup
        self.report = report or StartReport()
        #: For the log.
        self.notes: list[str] = []
        self.config = read_served(setup.model, setup.model_impl, _ask_transformers)
        vocab_size = self.config.vocab_size
        self.compiler = GrammarCompiler(lambda: checkpoint_vocabulary(setup.tokenizer or setup.model, vocab_size))
        self._grammars = GrammarTable(self.compiler, vocab_size, num_threads=max(torch.get_num_threads() // 2, 1))

    @abstractmethod
    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """A step from its launch to its tokens. Raises DesyncError, with nothing computed."""

    @abstractmethod
    def host_info(self) -> dict[str, Any]:
        """The host as the header of a trace describes it."""

    @property
    def waits_for_peers(self) -> bool:
        """Whether a step waits for another rank of the replica; never where there is one."""
        return False

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Build the matcher of a grammar over the checkpoint's vocabulary."""
        return self.compiler.prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """Time real steps."""
        self.report.begin(MEASURING_STEPS)
        return warm_up(self)

    def describe(self) -> tuple[str, dict[str, Any]]:
        """The model's fingerprint, and the host."""
        other_tokenizer = {"tokenizer": self.setup.tokenizer} if self.setup.tokenizer else {}
        return model_fingerprint(self.setup.model), self.host_info() | other_tokenizer

    def _end_of(self, sequence: WorkerSequence, token_id: int, next_id: int, position: int) -> WorkerEnd | None:
        """The end that a drawn token is to its sequence, if it is one. A grammar goes on with `next_id`."""
        if sequence.params.grammar:
            return self._grammars.end_of(sequence, token_id, next_id, position)
        return end_of(sequence.params, token_id, position)


def _ask_transformers(folder: Path) -> TransformersModel:
    # It takes seconds to load, and most models need none of it.
    from eventlm.models.transformers_probe import probe_model

    return probe_model(folder)
