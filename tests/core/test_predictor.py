"""Predicted times are exact integer arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor, StepShape
from eventlm.errors import UsageError

PREDICTOR = Predictor.from_coefficients([7_000, 1_100, 1_300, 17, 3])


def test_a_step_is_the_sum_of_its_features() -> None:
    shape = StepShape(prefill_tokens=11, num_decodes=5, context_tokens=1001, chunk_context=77, num_chunks=2)
    assert PREDICTOR.step_ps(shape) == 7_000 + 1_100 * 11 + 1_300 * 5 + 17 * 1001 + 3 * 77


def test_a_shape_counts_its_chunks() -> None:
    shape = StepShape(num_decodes=2, context_tokens=50)
    shape.add_chunk(100, 8)
    shape.add_chunk(0, 3)
    assert shape == StepShape(
        prefill_tokens=11, num_decodes=2, context_tokens=161, chunk_context=8 * 104 + 3 * 1, num_chunks=2
    )


def test_a_prompt_alone_takes_its_chunks() -> None:
    # 100 tokens, 30 done: 70 left in chunks of at most 32 are 3 steps, each reading the whole context.
    wanted = (7_000 * 3 + 1_100 * 70 + 17 * 100 * 3 + 3 * 70 * (30 + 35)) // 1000
    assert PREDICTOR.prefill_ns(100, 30, 32) == wanted


def test_nothing_left_takes_no_time() -> None:
    assert PREDICTOR.prefill_ns(100, 100, 32) == 0
    assert PREDICTOR.prefill_ns(0, 0, 32) == 0


def test_more_work_never_takes_less_time() -> None:
    predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
    times = [predictor.prefill_ns(num_tokens, 0, 512) for num_tokens in range(0, 5000, 13)]
    assert times == sorted(times)
    left = [predictor.prefill_ns(5000, done, 512) for done in range(0, 5001, 7)]
    assert left == sorted(left, reverse=True)


def test_huge_prompts_keep_their_last_nanosecond() -> None:
    predictor = Predictor.from_coefficients([0, 1000, 0, 0, 0])
    assert predictor.prefill_ns(2**60 + 1, 0, 2**61) - predictor.prefill_ns(2**60, 0, 2**61) == 1


def test_coefficients_come_back_as_they_went_in() -> None:
    assert Predictor.from_coefficients(list(DEFAULT_COEFFICIENTS)).coefficients() == list(DEFAULT_COEFFICIENTS)


@given(
    coefficients=st.lists(st.sampled_from([0, 1, 7, 1000, 50_000]), min_size=5, max_size=5),
    spare_ps=st.integers(-10, 10**6),
    start=st.integers(0, 100),
)
def test_the_largest_chunk_is_that_of_trying_every_size(coefficients: list[int], spare_ps: int, start: int) -> None:
    predictor = Predictor.from_coefficients(coefficients)

    def added_ps(num_tokens: int) -> int:
        shape = StepShape(num_tokens, 0, num_tokens, num_tokens * (start + num_tokens // 2))
        return predictor.step_ps(shape) - predictor.base_ps

    wanted = max([n for n in range(201) if added_ps(n) <= spare_ps], default=0)
    assert predictor.tokens_within(spare_ps, start, 200) == wanted


@pytest.mark.parametrize("coefficients", [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, -5]])
def test_others_are_refused(coefficients: list[int]) -> None:
    with pytest.raises(UsageError, match="5 non-negative"):
        Predictor.from_coefficients(coefficients)


def test_the_chunks_of_a_prompt_go_through_all_stages() -> None:
    # Equal chunks: as many steps more as there are stages after the first.
    predictor = Predictor.from_coefficients([7_000, 1_000, 0, 0, 0])
    step_ns = 7 + 16
    for num_chunks, num_stages in ((1, 1), (1, 4), (8, 4), (100, 3)):
        wanted = (num_chunks + num_stages - 1) * step_ns
        assert predictor.prefill_ns(16 * num_chunks, 0, 16, num_stages) == wanted
    assert predictor.prefill_ns(16, 16, 16, 4) == 0


def test_more_work_never_takes_less_time_in_a_pipeline() -> None:
    predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
    times = [predictor.prefill_ns(num_tokens, 0, 512, 4) for num_tokens in range(0, 5000, 13)]
    assert times == sorted(times)
    left = [predictor.prefill_ns(5000, done, 512, 4) for done in range(0, 5001, 7)]
    assert left == sorted(left, reverse=True)
