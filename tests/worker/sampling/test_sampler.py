"""What is drawn: the distributions of every parameter that shapes one, and that a row's draw is its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eventlm.worker.sampling.sampler import NOT_FINITE
from tests.worker.draws import draw, make_sampler, random_logits, sequence

#: One of each way to draw, with and without processors.
MIXED: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "temperature": 0.0},
    {"seed": 3, "temperature": 0.7, "top_k": 20},
    {"seed": 4, "temperature": 1.3, "top_p": 0.9},
    {"seed": 5, "temperature": 0.01, "top_p": 0.5, "top_k": 3},
    {"seed": 2**64 - 1, "temperature": 2.0},
    {"seed": 1, "index": 1},
    {"seed": 1, "output": [5]},
    {"seed": 9, "temperature": 2.0, "top_p": 0.999},
    {"seed": 10, "min_p": 0.1},
    {"seed": 11, "temperature": 1.9, "min_p": 0.5, "top_k": 700},
    {"seed": 12, "top_k": 1},
    {"seed": 13, "temperature": 0.0, "repetition_penalty": 1.5, "prompt": list(range(500))},
    {"seed": 14, "frequency_penalty": 0.5, "presence_penalty": -0.5, "output": [3, 3, 4, 9, 3]},
    {"seed": 15, "top_p": 0.8, "repetition_penalty": 0.7, "prompt": [7, 8, 9]},
    {"seed": 16, "allowed_token_ids": (4, 9, 2999), "bad_words_token_ids": ((9,),)},
    {"seed": 17, "bad_words_token_ids": ((1, 8), (5,)), "top_k": 40},
    {"seed": 18, "logit_bias": {17: 9.0, 18: -100.0}, "temperature": 0.0},
    {"seed": 19, "min_tokens": 3, "eos_token_ids": (0,), "stop_token_ids": (1, 2), "output": [6]},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3000, 20_011])
def test_a_draw_does_not_depend_on_the_batch(dtype: torch.dtype, vocab_size: int) -> None:
    logits = random_logits(len(MIXED), vocab_size).to(dtype)
    before = logits.clone()
    sequences = [sequence(number, **fields) for number, fields in enumerate(MIXED)]
    together = draw(logits, sequences)
    alone = [draw(logits[number : number + 1], [each])[0] for number, each in enumerate(sequences)]
    backwards = draw(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [3000, 20_011])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", ["all", "one"])
def test_rows_with_nan_or_infinity_draw_no_token(vocab_size: int, value: float, place: str) -> None:
    """However they draw; their neighbours draw what they always do."""
    logits = random_logits(2 * len(MIXED), vocab_size)
    sequences = [sequence(number, **fields) for number, fields in enumerate([*MIXED, *MIXED])]
    expected = draw(logits, sequences)
    logits[::2, slice(None) if place == "all" else 11] = value
    drawn = draw(logits, sequences)
    assert drawn[1::2] == expected[1::2]
    # What is masked is not looked at.
    masks = [("allowed_token_ids" in fields and place == "one") for fields in [*MIXED, *MIXED][::2]]
    assert [token == NOT_FINITE for token in drawn[::2]] == [not masked for masked in masks]


def test_a_row_that_draws_no_token_counts_none() -> None:
    each = sequence(prompt=range(5), repetition_penalty=1.5, temperature=0.0)
    sampler = make_sampler(60, [each])
    assert sampler.sample(torch.full((1, 60), math.nan), [each]).tolist() == [NOT_FINITE]
    logits = random_logits(1, 60)
    assert sampler.sample(logits, [each]).tolist() == draw(logits, [each])


def test_many_rows_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(MIXED), 1000)
    sequences = [sequence(number, **fields) for number, fields in enumerate(MIXED)]
    expected = draw(logits, sequences)
    monkeypatch.setattr("eventlm.worker.sampling.sampler.SLICE_ENTRIES", 2500)
    monkeypatch.setattr("eventlm.worker.sampling.sampler._NOISE_ENTRIES", 1500)
    monkeypatch.setattr("eventlm.worker.sampling.candidates._CACHED_ENTRIES", 1500)
    assert draw(logits, sequences) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 30, "top_p": 0.7},
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position", "index"])
def test_draws_follow_the_distribution(params: dict[str, float], varied: str) -> None:
    logits = random_logits(1, 60, seed=4)
    num_draws = 4000
    if varied == "position":
        sequences = [sequence(number, seed=number, **params) for number in range(20)]
        sampler, draws = make_sampler(60, sequences), []
        for _ in range(num_draws // len(sequences)):
            tokens = sampler.sample(logits.expand(len(sequences), -1), sequences).tolist()
            for each, token in zip(sequences, tokens, strict=True):
                each.token_ids.append(token)
            draws += tokens
    else:
        sequences = [sequence(number, **{varied: number}, **params) for number in range(num_draws)]
        draws = draw(logits.expand(num_draws, -1), sequences)
    expected = transformers_warped(logits, params).double().softmax(dim=-1)[0].numpy() * num_draws
    observed = np.bincount(draws, minlength=60)
    assert not observed[expected == 0].any()
    likely = expected >= 5
    observed = np.append(observed[likely], observed[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > 1e-4


def transformers_warped(logits: torch.Tensor, params: dict[str, float]) -> torch.Tensor:
    """In the order of vLLM: temperature, min-p, top-k, top-p."""
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(float(params["temperature"]))(ids, logits)
    if params.get("min_p"):
        scores = MinPLogitsWarper(params["min_p"])(ids, scores)
    if params.get("top_k"):
        scores = TopKLogitsWarper(int(params["top_k"]))(ids, scores)
    if params.get("top_p", 1.0) < 1.0:
        scores = TopPLogitsWarper(params["top_p"])(ids, scores)
    return scores


def test_a_mask_does_not_change_what_is_drawn_among_what_it_leaves() -> None:
    logits = random_logits(1, 5000, seed=2).expand(200, -1)
    free = draw(logits, [sequence(seed, seed=seed) for seed in range(200)])
    ranks = logits[0].argsort(descending=True).argsort()[free].tolist()
    for top_k in (3, 50, 2000):
        masked = draw(logits, [sequence(seed, seed=seed, top_k=top_k) for seed in range(200)])
        same = [one == other for one, other, rank in zip(free, masked, ranks, strict=True) if rank < top_k]
        assert len(same) > 20
        assert all(same)


def test_a_nucleus_that_does_not_fit_its_candidates_is_drawn_whole() -> None:
    flat = random_logits(1, 2000, seed=1) * 0.01
    draws = draw(flat.expand(400, -1), [sequence(seed, seed=seed, top_p=0.9) for seed in range(400)])
    ranks = flat[0].argsort(descending=True).argsort()[draws]
    assert 1100 < ranks.max() < 1810


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"temperature": 1e-6},
        {"temperature": 0.0},
        {"top_k": 99},
        {"repetition_penalty": 1.2},
    ],
)
def test_extreme_values(params: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1e30, -math.inf, 5.0], [-math.inf, -math.inf, 3.0, -math.inf]])
    assert draw(logits, [sequence(1, seed=1, **params), sequence(2, seed=2, **params)]) == [1, 2]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[1, 4000:] = 1.0
    logits[2, 17] = logits[2, 4999] = 2.0
    assert draw(logits, [sequence(number, temperature=0.0) for number in range(3)]) == [0, 4000, 17]
    processed = {"temperature": 0.0, "logit_bias": {3000: -1.0}}
    assert draw(logits, [sequence(number, **processed) for number in range(3)]) == [0, 4000, 17]


def test_a_batch_pays_only_for_requested_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "eventlm.worker.sampling.sampler.process_logits", lambda logits, rows, table: seen.append(len(logits))
    )
    logits = random_logits(len(MIXED), 3000)
    draw(logits[:12], [sequence(number, **fields) for number, fields in enumerate(MIXED[:12])])
    assert seen == []
    draw(logits, [sequence(number, **fields) for number, fields in enumerate(MIXED)])
    assert sum(seen) == len(MIXED) - 12


def test_no_rows() -> None:
    assert draw(torch.empty(0, 50), []) == []
