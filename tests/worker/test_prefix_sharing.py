"""The samples of one request: a core drives a real runner, and who computed what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eventlm.events import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import SequenceId
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import StepPayload
from tests.checkpoints import make_checkpoint
from tests.core.rig import Rig
from tests.worker.launches import new_sequence
from tests.worker.reference import make_runner
from tests.worker.test_model_runner import prompt_of

BLOCK_SIZE = 4
NUM_OUTPUT_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class DrivenRunner:
    """Executes a core's launches for the samples of one request, and counts the prompt tokens computed."""

    def __init__(self, rig: Rig, runner: ModelRunner, request: int, prompt: list[int], params: SamplingParams) -> None:
        self._rig = rig
        self._runner = runner
        self._request = request
        self._prompt = prompt
        self._params = params
        self._held: set[SequenceId] = set()
        self.outputs: dict[int, list[int]] = {}
        self.num_prefill_tokens = 0

    def finish(self) -> None:
        """Run until nothing is in flight."""
        while self._rig.flying[0]:
            tokens = self._execute(self._rig.flying[0][0])
            self._rig.complete(produced=list(map(len, tokens)))

    def _execute(self, launch: Launched) -> list[list[int]]:
        rows = [SequenceId(row[0], row[1]) for row in [*launch.decodes, *launch.chunks]]
        new = [row for row in rows if row not in self._held]
        self._held.update(new)
        self.num_prefill_tokens += sum(chunk[3] for chunk in launch.chunks)
        payload = StepPayload(
            new=[new_sequence(self._request, self._prompt, index=row.index, params=self._params) for row in new]
        )
        tokens = self._runner.execute(launch, payload).tokens
        for row, produced in zip(rows, tokens, strict=True):
            self.outputs.setdefault(row.index, []).extend(produced)
        return tokens


@pytest.mark.parametrize(("num_full_blocks", "num_tail_tokens"), [(5, 3), (4, 4), (0, 2)])
@pytest.mark.parametrize("budget", [512, 7])
def test_full_blocks_are_computed_once_and_the_tail_by_each(
    folder: Path, num_full_blocks: int, num_tail_tokens: int, budget: int
) -> None:
    n, num_shared = 4, num_full_blocks * BLOCK_SIZE
    prompt = prompt_of(num_shared + num_tail_tokens)
    rig = Rig(num_blocks=64, max_num_batched_tokens=budget, block_size=BLOCK_SIZE)
    request = rig.arrive(len(prompt), NUM_OUTPUT_TOKENS, n=n, blocks=list(range(1, 1 + len(prompt) // BLOCK_SIZE)))
    params = SamplingParams(seed=5, ignore_eos=True)
    driven = DrivenRunner(rig, make_runner(folder, num_blocks=64), request, prompt, params)
    driven.finish()
    assert driven.num_prefill_tokens == num_shared + n * num_tail_tokens
    assert [end[2:] for end in rig.finished()] == [("length", NUM_OUTPUT_TOKENS)] * n
    assert len({tuple(output) for output in driven.outputs.values()}) == n


def test_samples_that_share_blocks_match_transformers(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = prompt_of(23)
    rig = Rig(num_blocks=64)
    request = rig.arrive(len(prompt), NUM_OUTPUT_TOKENS, n=3, blocks=[1, 2, 3, 4, 5])
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    driven = DrivenRunner(rig, make_runner(folder, num_blocks=64), request, prompt, params)
    driven.finish()
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    assert list(driven.outputs.values()) == [expected[0, len(prompt) :].tolist()] * 3
