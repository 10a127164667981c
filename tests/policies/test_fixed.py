"""Chunks of a fixed budget."""

from __future__ import annotations

import pytest

from eventlm.core.plugin import StepLoad
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.policies.fixed import Fixed
from tests.policies.views import view

PREDICTOR = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)


@pytest.mark.parametrize(("max_chunk_tokens", "max_tokens", "wanted"), [(0, 512, 512), (64, 512, 64), (64, 5, 5)])
def test_chunks_take_what_is_left_up_to_their_own_limit(max_chunk_tokens: int, max_tokens: int, wanted: int) -> None:
    fixed = Fixed(max_chunk_tokens=max_chunk_tokens)
    assert fixed.chunk_tokens(StepLoad(), view(), max_tokens, PREDICTOR) == wanted


@pytest.mark.parametrize("value", [-1, 1.5, "64"])
def test_parameters_are_checked(value: object) -> None:
    with pytest.raises(UsageError, match="max_chunk_tokens"):
        resolve("batcher", {"type": "fixed", "max_chunk_tokens": value})
