from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eventlm.worker.sampling.candidates import mask_candidates, top_entries
from tests.worker.draws import make_sampler, random_logits, sequence
from tests.worker.sampling.test_sampler import transformers_warped


def params_of(num_rows: int, vocab_size: int, **params: Any) -> Any:
    sequences = [sequence(number, **params) for number in range(num_rows)]
    return make_sampler(vocab_size, sequences).table.rows(sequences).params


@pytest.mark.parametrize("vocab_size", [100, 5000, 20_000, 20_011])
@pytest.mark.parametrize("num_entries", [1, 7, 64, 100])
def test_they_are_the_largest_in_order_the_lower_id_first_of_equals(vocab_size: int, num_entries: int) -> None:
    logits = random_logits(8, vocab_size, seed=vocab_size)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, ::2] = -0.0
    logits[3, 1::2] = 0.0
    logits[4, 10:] = -math.inf
    logits[5] = logits[5].bfloat16().float()
    logits[6, -1] = 1e30
    values, ids = top_entries(logits, num_entries)
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :num_entries])
    assert torch.equal(values, order.values[:, :num_entries])


@pytest.mark.parametrize("min_p", [0.0, 0.001, 0.2])
@pytest.mark.parametrize("top_k", [0, 1, 5, 600, 5000])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.99, 1.0])
def test_masks_are_transformers(top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(6, 2000, seed=top_k)
    params = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = transformers_warped(logits, params)
    masks = params_of(6, 2000, **params)
    for num_candidates in (64, 1024, 2000):
        candidates = mask_candidates(logits, masks, num_candidates)
        found = torch.full_like(logits, -math.inf).scatter(1, candidates.ids, candidates.scores)
        enough = ~candidates.short
        assert torch.equal(found[enough].isinf(), expected[enough].isinf())
        assert torch.allclose(found[enough], expected[enough])
        # Nobody is given more than it needs: a row is short only if so many pass one of its masks.
        wide = transformers_warped(logits, params | ({"top_p": 1.0} if top_k or min_p else {}))
        assert ((wide.isfinite().sum(dim=-1) <= num_candidates) <= enough).all()
    assert enough.all()


def test_a_row_that_needs_more_says_so() -> None:
    logits = torch.zeros(2, 2000)
    logits[1, 77] = 30.0
    for params in ({"top_p": 0.9}, {"min_p": 0.5}, {"min_p": 0.5, "top_p": 0.9}):
        assert mask_candidates(logits, params_of(2, 2000, **params), 64).short.tolist() == [True, False]
    assert mask_candidates(logits, params_of(2, 2000, top_k=65), 64).short.tolist() == [True, True]
    assert mask_candidates(logits, params_of(2, 2000, top_k=64), 64).short.tolist() == [False, False]
