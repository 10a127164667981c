"""Log-probabilities and embeddings of a real runner, against transformers on the same checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from eventlm.sampling_params import SamplingParams, TokenLogprobs
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.worker.launches import GREEDY, new_sequence
from tests.worker.reference import Key, Pair, Schedule, make_pair
from tests.worker.test_model_runner import prompt_of

LENGTH = 61


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(make_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def prefill(schedule: Schedule, sizes: list[int], *, request: int = 1, samples: bool = True, **new: Any) -> None:
    """A prompt in chunks, in blocks of its own."""
    start = 0
    for number, size in enumerate(sizes):
        schedule.step(
            new=[structs.replace(new_sequence(request, prompt_of(LENGTH, seed=request)), **new)] if not number else [],
            chunks=[(request, 0, start, size, int(samples and start + size == LENGTH))],
            blocks=[(0, 0, list(range(request * 20, request * 20 + 20)))] if not number else [],
        )
        start += size


def logits_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Transformers', [tokens, V]."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def check(found: TokenLogprobs, logits: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """Entry by entry what log_softmax of these logits says of these tokens."""
    expected = logits.log_softmax(dim=-1)
    own = expected.gather(1, torch.tensor(token_ids)[:, None])
    assert found.logprobs == pytest.approx(own[:, 0].tolist(), abs=1e-4)
    assert found.ranks == ((expected > own).sum(dim=-1) + 1).tolist()
    top = expected.topk(num_top, dim=-1)
    assert found.top_ids == top.indices.tolist()
    assert np.array(found.top_logprobs) == pytest.approx(top.values.numpy(), abs=1e-4)


def joined(schedule: Schedule, key: Key) -> TokenLogprobs:
    """A sequence's log-probabilities of its output, step after step."""
    parts = [beside.logprobs for beside in schedule.extras[key]]
    assert all(part is not None and len(part.logprobs) == 1 for part in parts)
    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return TokenLogprobs(**{name: [getattr(part, name)[0] for part in parts] for name in names})


def test_logprobs_are_the_model_s_whatever_the_parameters_do(pair: Pair, schedule: Schedule) -> None:
    shaped = {"temperature": 0.3, "top_k": 2, "repetition_penalty": 5.0, "seed": 3, "logprobs": 4}
    prefill(schedule, [LENGTH], params=SamplingParams(ignore_eos=True, **shaped))
    prefill(schedule, [LENGTH], request=2, params=structs.replace(GREEDY, logprobs=1))
    prefill(schedule, [LENGTH], request=3)
    schedule.decode({(request, 0): prompt_of(LENGTH, seed=request) for request in (1, 2, 3)}, 8)
    assert (3, 0) not in schedule.extras
    for request, num_top in ((1, 4), (2, 1)):
        output = schedule.outputs[request, 0]
        logits = logits_of(pair.model, prompt_of(LENGTH, seed=request) + output[:-1])[LENGTH - 1 :]
        check(joined(schedule, (request, 0)), logits, output, num_top)
    assert max(joined(schedule, (1, 0)).ranks) > 1


def test_logprobs_of_named_tokens_beside_rows_with_others(pair: Pair, schedule: Schedule) -> None:
    named = [7, 300, 0, VOCAB_SIZE - 1]
    prefill(schedule, [LENGTH], params=structs.replace(GREEDY, logprobs=3, logprob_token_ids=named))
    prefill(schedule, [LENGTH], request=2, params=structs.replace(GREEDY, logprobs=2))
    schedule.decode({(request, 0): prompt_of(LENGTH, seed=request) for request in (1, 2)}, 5)
    output = schedule.outputs[1, 0]
    rows = logits_of(pair.model, prompt_of(LENGTH, seed=1) + output[:-1])[LENGTH - 1 :].log_softmax(dim=-1)
    found = joined(schedule, (1, 0))
    assert found.top_ids == [named] * len(output)
    assert np.array(found.top_logprobs) == pytest.approx(rows[:, named].numpy(), abs=1e-4)
    assert found.logprobs == pytest.approx(rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist(), abs=1e-4)
    assert found.ranks == [1] * len(output)
    assert {len(ids) for ids in joined(schedule, (2, 0)).top_ids} == {2}


@pytest.mark.parametrize("sizes", [[LENGTH], [1, 1, 30, 29], [7, 13, 40, 1], [60, 1]])
@pytest.mark.parametrize("kind", ["generate", "score"])
def test_prompt_logprobs_of_chunks(pair: Pair, schedule: Schedule, sizes: list[int], kind: Any) -> None:
    params = structs.replace(GREEDY, prompt_logprobs=3)
    prefill(schedule, sizes, params=params, kind=kind, samples=kind == "generate")
    prompt = prompt_of(LENGTH, seed=1)
    logits = logits_of(pair.model, prompt)
    index = 1
    for beside in schedule.extras[1, 0]:
        assert beside.prompt_logprobs is not None
        assert beside.prompt_start == index
        end = index + len(beside.prompt_logprobs.logprobs)
        check(beside.prompt_logprobs, logits[index - 1 : end - 1], prompt[index:end], 3)
        index = end
    assert index == LENGTH
    assert ((1, 0) in schedule.outputs) == (kind == "generate")


def test_after_a_preemption_they_come_again(pair: Pair, schedule: Schedule) -> None:
    params = structs.replace(GREEDY, prompt_logprobs=0, logprobs=0)
    prefill(schedule, [LENGTH], params=params)
    schedule.decode({(1, 0): prompt_of(LENGTH, seed=1)}, 3)
    first = schedule.extras.pop((1, 0))
    history = prompt_of(LENGTH, seed=1) + schedule.outputs[1, 0]
    schedule.step(
        forget=[(1, 0)],
        new=[new_sequence(1, history, num_prompt_tokens=LENGTH, params=params)],
        chunks=[(1, 0, 40, len(history) - 40, 1)],
        blocks=[(0, 0, list(range(20, 40)))],
    )
    [again] = schedule.extras[1, 0]
    assert again.prompt_start == 41
    assert again.prompt_logprobs is not None
    assert again.logprobs is not None
    assert first[0].prompt_logprobs is not None
    assert again.prompt_logprobs.logprobs == pytest.approx(first[0].prompt_logprobs.logprobs[40:], abs=1e-4)
    assert again.prompt_logprobs.top_ids == [[]] * 20


def test_score_without_a_number_has_the_tokens_own(schedule: Schedule) -> None:
    prefill(schedule, [LENGTH], params=GREEDY, kind="score", samples=False)
    [beside] = schedule.extras[1, 0]
    assert beside.prompt_logprobs is not None
    assert len(beside.prompt_logprobs.logprobs) == LENGTH - 1
    assert beside.prompt_logprobs.top_ids == [[]] * (LENGTH - 1)


@pytest.mark.parametrize("sizes", [[LENGTH], [1, 60], [50, 11]])
def test_an_embedding_is_the_last_hidden_state_after_the_last_norm(
    pair: Pair, schedule: Schedule, sizes: list[int]
) -> None:
    prefill(schedule, sizes, kind="pool", samples=False)
    [beside] = schedule.extras[1, 0]
    with torch.inference_mode():
        expected = pair.model.model(torch.tensor([prompt_of(LENGTH, seed=1)])).last_hidden_state[0, -1]
    assert np.frombuffer(beside.embedding, dtype="<f4") == pytest.approx(expected.numpy(), abs=1e-4)
    assert beside.prompt_logprobs is None
    assert beside.logprobs is None
    assert not schedule.outputs


MEAN = structs.replace(GREEDY, pooling="mean")


def mean_of(pair: Pair, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return pair.model.model(torch.tensor([token_ids])).last_hidden_state[0].mean(dim=0).numpy()


@pytest.mark.parametrize("sizes", [[LENGTH], [1, 60], [50, 11], [20, 20, 20, 1]])
def test_a_mean_is_over_all_chunks(pair: Pair, schedule: Schedule, sizes: list[int]) -> None:
    prefill(schedule, sizes, kind="pool", samples=False, params=MEAN)
    [beside] = schedule.extras[1, 0]
    found = np.frombuffer(beside.embedding, dtype="<f4")
    assert found == pytest.approx(mean_of(pair, prompt_of(LENGTH, seed=1)), abs=1e-4)


def test_a_mean_starts_anew_with_its_prompt(pair: Pair, schedule: Schedule) -> None:
    """Whether the sequence is held, or was forgotten behind a preemption."""
    prompt = prompt_of(LENGTH, seed=1)
    new = structs.replace(new_sequence(1, prompt, params=MEAN), kind="pool")
    blocks = [(0, 0, list(range(20, 40)))]
    schedule.step(new=[new], chunks=[(1, 0, 0, 40, 0)], blocks=blocks)
    schedule.step(chunks=[(1, 0, 0, 30, 0)], blocks=blocks)
    schedule.step(forget=[(1, 0)], new=[new], chunks=[(1, 0, 0, 50, 0)], blocks=blocks)
    schedule.step(chunks=[(1, 0, 50, LENGTH - 50, 0)])
    [beside] = schedule.extras[1, 0]
    assert np.frombuffer(beside.embedding, dtype="<f4") == pytest.approx(mean_of(pair, prompt), abs=1e-4)


def test_kinds_share_a_step(pair: Pair, schedule: Schedule) -> None:
    prompts = [prompt_of(9, seed=request) for request in range(4)]
    kinds: list[Any] = ["pool", "generate", "score", "pool"]
    params = structs.replace(GREEDY, logprobs=2)
    schedule.step(
        new=[
            structs.replace(new_sequence(request, prompt, params=params), kind=kind)
            for request, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        ],
        chunks=[(request, 0, 0, 9, int(kind == "generate")) for request, kind in enumerate(kinds)],
        blocks=[(row, 0, [3 * row, 3 * row + 1, 3 * row + 2]) for row in range(4)],
    )
    assert sorted(schedule.extras) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for request in (0, 3):
        with torch.inference_mode():
            expected = pair.model.model(torch.tensor([prompts[request]])).last_hidden_state[0, -1]
        [beside] = schedule.extras[request, 0]
        assert np.frombuffer(beside.embedding, dtype="<f4") == pytest.approx(expected.numpy(), abs=1e-4)
    check(joined(schedule, (1, 0)), logits_of(pair.model, prompts[1])[-1:], schedule.outputs[1, 0], 2)
    assert max(schedule.outputs[1, 0]) < VOCAB_SIZE
