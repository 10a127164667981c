"""The largest chunk whose predicted step time meets the target, against trying every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.plugin import StepLoad
from eventlm.core.predictor import Predictor
from eventlm.engine.plugins.registry import resolve
from eventlm.errors import UsageError
from eventlm.policies.dynamic import Dynamic
from tests.policies.views import view

PREDICTOR = Predictor.from_coefficients([2_000_000_000, 40_000_000, 100_000_000, 20_000, 10_000])


def load_of(num_decodes: int, context_tokens: int, chunks: list[tuple[int, int]]) -> StepLoad:
    load = StepLoad()
    load.decode_tokens = load.num_decodes = num_decodes
    load.context_tokens = context_tokens
    for start, num_tokens in chunks:
        load.add_chunk(start, num_tokens)
    return load


@given(
    target_ms=st.sampled_from([1, 2.5, 10, 100]),
    min_chunk_tokens=st.sampled_from([1, 16, 64]),
    max_tokens=st.integers(1, 400),
    done_tokens=st.integers(0, 100_000),
    num_decodes=st.integers(0, 300),
    chunks=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 500)), max_size=3),
)
def test_it_is_the_largest_that_meets_the_target(
    target_ms: float,
    min_chunk_tokens: int,
    max_tokens: int,
    done_tokens: int,
    num_decodes: int,
    chunks: list[tuple[int, int]],
) -> None:
    def step_ns(num_tokens: int) -> int:
        with_it = load_of(num_decodes, num_decodes * 50, [*chunks, (done_tokens, num_tokens)])
        return PREDICTOR.step_ps(with_it) // 1000

    fitting = [tokens for tokens in range(1, max_tokens + 1) if step_ns(tokens) <= target_ms * 1_000_000]
    wanted = min(max(fitting[-1] if fitting else 0, min_chunk_tokens), max_tokens)
    batcher = Dynamic(target_ms=target_ms, min_chunk_tokens=min_chunk_tokens)
    load = load_of(num_decodes, num_decodes * 50, chunks)
    assert batcher.chunk_tokens(load, view(done_tokens=done_tokens), max_tokens, PREDICTOR) == wanted


def test_a_long_prompt_goes_on_however_long_decodes_take() -> None:
    load = load_of(10_000, 10_000_000, [])
    assert Dynamic().chunk_tokens(load, view(done_tokens=100_000), 512, PREDICTOR) == 16


@pytest.mark.parametrize("parameters", [
    {"target_ms": 0}, {"target_ms": -3}, {"min_chunk_tokens": 0}, {"min_chunk_tokens": 2.5},
])  # fmt: skip
def test_parameters_are_checked(parameters: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(parameters))):
        resolve("batcher", {"type": "dynamic", **parameters})
