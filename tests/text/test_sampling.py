"""From parameters as they are written to those that a worker samples by."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.sampling_params import SamplingParams
from eventlm.text.sampling import check_known_tokens, resolved


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 1e-5}, {"temperature": 1e-5}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 100}, {"top_k": 0}),
        ({"top_k": 99}, {"top_k": 99}),
        ({"logprobs": -1, "prompt_logprobs": 500}, {"logprobs": 100, "prompt_logprobs": 100}),
    ],
)
def test_standard_forms(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = resolved(SamplingParams(**given), vocab_size=100, bad_words_token_ids=((1, 2),), grammar="g")
    assert {name: getattr(params, name) for name in expected} == expected
    assert (params.bad_words_token_ids, params.grammar) == (((1, 2),), "g")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids[0]"),
        ({"logit_bias": {100: 1.0}}, "logit_bias.100"),
    ],
)
def test_tokens_that_the_model_does_not_have(given: dict[str, Any], param: str) -> None:
    check_known_tokens(SamplingParams(**given), 101)
    with pytest.raises(InputError) as caught:
        check_known_tokens(SamplingParams(**given), 100)
    assert caught.value.param == param
