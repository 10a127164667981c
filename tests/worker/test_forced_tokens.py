"""A worker that goes on with tokens that it was given: what it would have drawn itself follows from those."""

from __future__ import annotations

import pytest

from eventlm.sampling_params import SamplingParams
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.fake.tokens import fake_token
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import StepPayload
from tests.worker.gpu.driven import gpu_runner, small_checkpoint
from tests.worker.launches import launched, new_sequence
from tests.worker.reference import make_runner

PROMPT = [10, 20, 30, 40, 50]
FORCED = [200, 201, 200, 300, 201]
BLOCKS = [(0, 0, list(range(8)))]

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalized": SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=1.0, repetition_penalty=1.3),
    "drawn": SamplingParams(temperature=1.2, seed=7, top_p=0.9, bad_words_token_ids=((200, 201), (300, 7))),
}


@pytest.fixture(scope="module", params=["cpu", "cuda:0"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner | GpuRunner:
    folder = small_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return make_runner(folder) if request.param == "cpu" else gpu_runner(folder, block_size=4)


def _from_history(
    runner: ModelRunner | GpuRunner, request: int, forced: list[int], params: SamplingParams
) -> list[int]:
    """What a sequence with this history draws, and then it is forgotten."""
    history = PROMPT + forced
    new = new_sequence(request, history, num_prompt_tokens=len(PROMPT), params=params)
    blocks = [(0, 0, list(range(16, 24)))]
    launch = launched(0, chunks=[(request, 0, 0, len(history), 1)], blocks=blocks)
    output = runner.execute(launch, StepPayload(new=[new]))
    runner.execute(launched(0, forget=[(request, 0)]), StepPayload())
    return output.tokens[0]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_each_draw_is_that_of_a_sequence_with_the_forced_history(
    runner: ModelRunner | GpuRunner, params: SamplingParams
) -> None:
    own = [
        runner.execute(
            launched(0, chunks=[(1, 0, 0, len(PROMPT), 1)], blocks=BLOCKS),
            StepPayload(new=[new_sequence(1, PROMPT, params=params)], forced=[FORCED[:1]]),
        ).tokens[0]
    ]
    for step, token in enumerate(FORCED[1:], start=1):
        launch = launched(step, decodes=[(1, 0, len(PROMPT) + step, 0)])
        own.append(runner.execute(launch, StepPayload(forced=[[token]])).tokens[0])
    runner.execute(launched(9, forget=[(1, 0)]), StepPayload())
    expected = [_from_history(runner, 2, FORCED[:index], params) for index in range(len(FORCED))]
    assert own == expected
    # None of it is what was forced, so following one's own tokens would have shown.
    assert [token for (token,) in own] != FORCED


def test_an_end_is_that_of_the_workers_own_token(runner: ModelRunner | GpuRunner) -> None:
    (first,) = _from_history(runner, 3, [], PARAMS["greedy"])
    params = SamplingParams(temperature=0.0, stop_token_ids=(first,))
    output = runner.execute(
        launched(0, chunks=[(4, 0, 0, len(PROMPT), 1)], blocks=BLOCKS),
        StepPayload(new=[new_sequence(4, PROMPT, params=params)], forced=[[first + 1]]),
    )
    assert (output.tokens, output.ends) == ([[first]], [(0, "stop_token")])
    runner.execute(launched(1, forget=[(4, 0)]), StepPayload())


def test_the_fake_worker_continues_after_them() -> None:
    runner = FakeRunner({}, epoch=1, block_size=4, num_blocks=16)
    params = SamplingParams(seed=9)
    launch = launched(0, chunks=[(1, 0, 0, len(PROMPT), 1)], blocks=BLOCKS)
    step = runner.execute(launch, StepPayload(new=[new_sequence(1, PROMPT, params=params)], forced=[[1, 2, 3]]))
    assert step.tokens == [[fake_token(9, 0, 0)]]
    step = runner.execute(launched(1, decodes=[(1, 0, len(PROMPT) + 3, 0)]), StepPayload())
    assert step.tokens == [[fake_token(9, 0, 3)]]
