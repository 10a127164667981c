"""A replica whose ranks are threads of this process, and a schedule of all that requests can ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from eventlm.core.shards import Layout
from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import Peers, RowExtras, StepOutput, StepPayload
from tests.worker.launches import launched, new_sequence
from tests.worker.reference import make_runner

#: What requests ask for, in turns.
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 6, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": {9: 4.0}},
)
#: Of a sequence.
_NUM_BLOCKS = 12


class Replica:
    """Runs every launch on all ranks, and tells stages that do not sample what was drawn, as the engine does."""

    def __init__(
        self, model: Path, layout: Layout, peers: Peers, make_runner: Callable[..., Any] = make_runner, **changes: Any
    ) -> None:
        self.layout = layout
        self._pool = ThreadPoolExecutor(layout.num_ranks)
        self._results: list[tuple[int, list[list[int]]]] = []

        def make(rank: int) -> Any:
            return make_runner(model, layout=layout, rank=rank, peers=peers, **changes)

        self.runners = self.on_all(make)

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` gives for each rank, all at once."""
        return list(self._pool.map(work, range(self.layout.num_ranks)))

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """What the answering rank says."""
        told = structs.replace(payload, results=self._results)
        self._results = []
        sampling = self.layout.ranks_of_stage(self.layout.stages - 1)

        def run(rank: int) -> StepOutput:
            step = self.runners[rank].start(launch, payload if rank in sampling else told)
            while not step.is_done():
                pass
            output: StepOutput = step.finish()
            return output

        output: StepOutput = self.on_all(run)[self.layout.answering_rank]
        if self.layout.stages > 1:
            self._results = [(launch.step, output.tokens)]
        return output


class Talk:
    """Sequences that come in chunks, decode, are preempted and go, in steps that are the same for all runners."""

    def __init__(self, *, vocab_size: int, has_states: bool = False, num_sequences: int = 5) -> None:
        rng = random.Random(3)
        lengths = [rng.randrange(3, 30) for _ in range(num_sequences)]
        self._prompts = [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lengths]
        self._has_states = has_states
        self._step = 0

    def run(self, runner: Any, *, num_decodes: int = 6) -> list[StepOutput]:
        """The output of every step."""
        outputs = []
        histories = [list(prompt) for prompt in self._prompts]
        numbers = range(len(histories))
        params = [SamplingParams(**PARAMS[number % len(PARAMS)], ignore_eos=True) for number in numbers]
        new = [
            new_sequence(number, histories[number], num_prompt_tokens=len(self._prompts[number]), params=params[number])
            for number in numbers
        ]
        tables = [[number * _NUM_BLOCKS + place for place in range(_NUM_BLOCKS)] for number in numbers]
        first = [max(len(history) // 2, 1) for history in histories]

        def step(payload: StepPayload | None = None, **fields: Any) -> StepOutput:
            output: StepOutput = runner.execute(launched(self._step, **fields), payload or StepPayload())
            self._step += 1
            outputs.append(output)
            return output

        def append(output: StepOutput, rows: Sequence[int]) -> None:
            for number, tokens in zip(rows, output.tokens, strict=True):
                histories[number].extend(tokens)

        pooled = new_sequence(90, histories[0], kind="pool", params=SamplingParams(pooling="mean"))
        scored = new_sequence(91, histories[1], kind="score")
        step(
            StepPayload(new=[*new, pooled, scored]),
            chunks=[
                *((number, 0, 0, first[number], 0) for number in numbers),
                (90, 0, 0, len(histories[0]), 0),
                (91, 0, 0, len(histories[1]), 0),
            ],
            blocks=[
                *((number, 0, tables[number]) for number in numbers),
                (len(new), 0, list(range(200, 200 + _NUM_BLOCKS))),
                (len(new) + 1, 0, list(range(220, 220 + _NUM_BLOCKS))),
            ],
            states=self._states(len(new) + 2),
        )
        chunks = [(number, 0, first[number], len(histories[number]) - first[number], 1) for number in numbers]
        append(step(chunks=chunks, forget=[(90, 0), (91, 0)]), numbers)
        for _ in range(num_decodes):
            append(step(decodes=[(number, 0, len(histories[number]), 0) for number in numbers]), numbers)
        # One is preempted, comes back with its tokens, and decodes beside a chunk of another.
        again = new_sequence(0, list(histories[0]), num_prompt_tokens=len(self._prompts[0]), params=params[0])
        step(forget=[(0, 0)], decodes=[(1, 0, len(histories[1]), 0)])
        append(outputs[-1], [1])
        step(
            StepPayload(new=[again]),
            decodes=[(1, 0, len(histories[1]), 0)],
            chunks=[(0, 0, 0, len(histories[0]), 1)],
            blocks=[(1, 0, tables[0])],
            states=[(1, 0, -1, [])] if self._has_states else None,
        )
        append(outputs[-1], [1, 0])
        # What replays force takes the place of what was drawn.
        step(StepPayload(forced=[[7], [8]]), decodes=[(number, 0, len(histories[number]), 0) for number in (0, 1)])
        histories[0].append(7)
        histories[1].append(8)
        append(step(decodes=[(number, 0, len(histories[number]), 0) for number in (0, 1)]), [0, 1])
        step(forget=[(number, 0) for number in numbers])
        return outputs

    def _states(self, num_rows: int) -> list[tuple[int, int, int, list[tuple[int, int]]]] | None:
        return [(row, row, -1, []) for row in range(num_rows)] if self._has_states else None


def assert_alike(found: Sequence[StepOutput], expected: Sequence[StepOutput], *, tolerance: float) -> None:
    """The same tokens and ends, and numbers within the tolerance."""
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.ends for each in found] == [each.ends for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert [each.row for each in mine.extras] == [each.row for each in theirs.extras]
        for one, other in zip(mine.extras, theirs.extras, strict=True):
            assert numbers_of(one) == pytest.approx(numbers_of(other), abs=tolerance)


def numbers_of(extras: RowExtras) -> list[float]:
    """All that a row gave beside its tokens."""
    numbers: list[float] = np.frombuffer(extras.embedding, "<f4").tolist()
    for each in (extras.logprobs, extras.prompt_logprobs):
        if each is not None:
            numbers += [*each.logprobs, *(value for values in each.top_logprobs for value in values)]
    return numbers
