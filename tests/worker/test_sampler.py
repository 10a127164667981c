from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eventlm.sampler_params import SamplerParams
from eventlm.worker.sampler import SampledRow, gumbel_noise, mask_candidates, noise_keys, sample


def row(seed: int = 0, index: int = 0, position: int = 0, **params: float) -> SampledRow:
    return SampledRow(SamplerParams(seed=seed, **params), index, position)  # type: ignore[arg-type]


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


MIXED = [
    row(1),
    row(2, temperature=0.0),
    row(3, temperature=0.7, top_k=20),
    row(4, temperature=1.3, top_p=0.9),
    row(5, temperature=0.01, top_p=0.5, top_k=3),
    row(2**64 - 1, temperature=2.0),
    row(1, index=1),
    row(1, position=1),
    row(9, temperature=50.0, top_p=0.999),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    logits = random_logits(len(MIXED), 3000).to(dtype)
    together = sample(logits, MIXED)
    alone = [sample(logits[number : number + 1], [drawn])[0] for number, drawn in enumerate(MIXED)]
    backwards = sample(logits.flip(0), MIXED[::-1])[::-1]
    assert together == alone == backwards


def test_noise_is_keyed_by_seed_index_and_position() -> None:
    rows = [row(seed, index, position) for seed in (0, 1, 2**64 - 1) for index in (0, 1) for position in (0, 1)]
    noise = gumbel_noise(noise_keys(rows, torch.device("cpu")), torch.arange(1000, dtype=torch.int32))
    assert len({tuple(values.tolist()) for values in noise}) == len(rows)
    correlation = np.corrcoef(noise.numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.15


def test_noise_of_an_entry_does_not_depend_on_the_others() -> None:
    keys = noise_keys([row(1), row(2)], torch.device("cpu"))
    ids = torch.arange(49152, dtype=torch.int32)
    whole = gumbel_noise(keys, ids)
    some = torch.stack((ids[7::13][:100], ids.flip(0)[:100]))
    assert torch.equal(gumbel_noise(keys, some), whole.gather(1, some.long()))


def test_noise_never_changes() -> None:
    keys = noise_keys([row(42, 1, 7)], torch.device("cpu"))
    noise = gumbel_noise(keys, torch.tensor([0, 1, 49151], dtype=torch.int32))
    assert noise.tolist()[0] == pytest.approx([-0.55579, 0.0025294, 0.757159], abs=1e-5)


def test_noise_is_gumbel() -> None:
    rows = [row(seed) for seed in range(20)]
    noise = gumbel_noise(noise_keys(rows, torch.device("cpu")), torch.arange(50_000, dtype=torch.int32))
    assert noise.isfinite().all()
    noise = noise.double().flatten().sort().values
    distance = (torch.exp(-torch.exp(-noise)) - torch.linspace(0, 1, len(noise))).abs().max().item()
    # Kolmogorov-Smirnov at 1 in 1000.
    assert distance < 1.95 / math.sqrt(len(noise))


def chi_square(probabilities: torch.Tensor, draws: list[int]) -> tuple[float, int]:
    """Chi-square of the draws and its degrees of freedom; draws of no probability are infinite."""
    expected = probabilities.double().numpy() * len(draws)
    observed = np.bincount(draws, minlength=len(expected))
    if observed[expected == 0].any():
        return math.inf, 0
    likely = expected >= 5
    observed = np.append(observed[likely], observed[~likely].sum())
    expected = np.append(expected[likely], expected[~likely].sum())
    kept = expected > 0
    return float(((observed - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.7},
    ],
)
@pytest.mark.parametrize("varied", ["seed", "position", "index"])
def test_draws_follow_the_distribution(params: dict[str, float], varied: str) -> None:
    logits = random_logits(1, 60, seed=4)
    num_draws = 40_000
    rows = [row(**{varied: number}, **params) for number in range(num_draws)]
    draws = sample(logits.expand(num_draws, -1), rows)
    statistic, freedom = chi_square(transformers_warped(logits, params).softmax(dim=-1)[0], draws)
    # Chance goes beyond this about once in 100,000 tests.
    assert statistic < freedom + 7 * math.sqrt(2 * freedom)


def transformers_warped(logits: torch.Tensor, params: dict[str, float]) -> torch.Tensor:
    ids = torch.zeros((len(logits), 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(float(params["temperature"]))(ids, logits)
    if params.get("top_k"):
        scores = TopKLogitsWarper(int(params["top_k"]))(ids, scores)
    if params.get("top_p", 1.0) < 1.0:
        scores = TopPLogitsWarper(params["top_p"])(ids, scores)
    return scores


@pytest.mark.parametrize("top_k", [0, 1, 5, 600, 5000])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.99, 1.0])
def test_masks_are_transformers(top_k: int, top_p: float) -> None:
    logits = random_logits(6, 2000, seed=top_k)
    params = {"temperature": 0.8, "top_k": top_k, "top_p": top_p}
    expected = transformers_warped(logits, params)
    candidates = mask_candidates(logits / 0.8, [SamplerParams(**params)] * 6, 2000)  # type: ignore[arg-type]
    found = torch.full_like(logits, -math.inf).scatter(1, candidates.ids, candidates.scores)
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected)
    assert not candidates.short.any()


def test_rows_that_need_more_candidates_get_them() -> None:
    logits = torch.zeros(2, 2000)
    logits[1, 77] = 30.0
    params = SamplerParams(top_p=0.9)
    assert mask_candidates(logits, [params, params], 512).short.tolist() == [True, False]
    rows = [row(seed, top_p=0.9) for seed in range(400)]
    flat = torch.randn(1, 2000, generator=torch.Generator().manual_seed(1)) * 0.01
    draws = sample(flat.expand(400, -1), rows)
    ranks = flat[0].argsort(descending=True).argsort()[draws]
    assert 512 < ranks.max() < 1810


def test_extreme_values() -> None:
    logits = torch.tensor([[0.0, 1e30, -math.inf, 5.0], [-math.inf, -math.inf, 3.0, -math.inf]])
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 1e-6}, {"temperature": 0.0}, {"top_k": 99}):
        assert sample(logits, [row(1, **params), row(2, **params)]) == [1, 2]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits[1, 4000:] = 1.0
    logits[2, 17] = logits[2, 4999] = 2.0
    assert sample(logits, [row(temperature=0.0)] * 3) == [0, 4000, 17]
