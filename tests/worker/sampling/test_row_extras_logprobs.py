from __future__ import annotations

import pytest
import torch

from eventlm.worker.sampling.row_extras import one_of, token_logprobs
from tests.worker.draws import random_logits


@pytest.mark.parametrize("num_top", [0, 3, 100, -1, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_log_softmax(dtype: torch.dtype, num_top: int) -> None:
    logits = random_logits(5, 7000).to(dtype)
    tokens = torch.tensor([0, 6999, 5, 77, int(logits[4].float().argmax())])
    found = token_logprobs(lambda span: logits[span], tokens, 7000, num_top)
    expected = logits.float().log_softmax(dim=-1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    assert found.logprobs == pytest.approx(expected.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-5)
    num_listed = 7000 if num_top < 0 else min(num_top, 7000)
    assert found.top_ids == order[:, :num_listed].tolist()
    for values, others in zip(found.top_logprobs, expected.gather(1, order)[:, :num_listed].tolist(), strict=True):
        assert values == pytest.approx(others, abs=1e-5)
    indices = (order == tokens[:, None]).nonzero()[:, 1]
    assert found.ranks == (indices + 1).tolist()
    assert found.ranks[4] == 1


def test_slices_of_bounded_size_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(9, 500)
    tokens = torch.arange(9) * 50
    whole = token_logprobs(lambda span: logits[span], tokens, 500, 4)
    asked = []

    def some(span: slice) -> torch.Tensor:
        asked.append(span.stop - span.start)
        return logits[span]

    monkeypatch.setattr("eventlm.worker.sampling.row_extras.SLICE_ENTRIES", 1100)
    assert token_logprobs(some, tokens, 500, 4) == whole
    assert asked == [2, 2, 2, 2, 1]


def test_one_token_s_own() -> None:
    logits = random_logits(3, 50)
    found = token_logprobs(lambda span: logits[span], torch.tensor([4, 5, 6]), 50, 6)
    one = one_of(found, 1, 2)
    assert (one.logprobs, one.ranks) == ([found.logprobs[1]], [found.ranks[1]])
    assert (one.top_ids, one.top_logprobs) == ([found.top_ids[1][:2]], [found.top_logprobs[1][:2]])
    assert one_of(found, 0, -1).top_ids == [found.top_ids[0]]
