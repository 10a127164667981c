from __future__ import annotations

from decimal import Inexact, getcontext, localcontext

import pytest

from eventlm.types import ceil_div, parts_per_million


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (1, 1_000_000), (0.1, 100_000), ("0.3", 300_000), (1e-6, 1), (-2.5, -2_500_000), ("1e3", 1_000_000_000)],
)
def test_millionths_are_those_of_the_decimal_form(value: float | str, expected: int) -> None:
    assert parts_per_million(value) == expected


def test_half_a_millionth_goes_to_the_even_one() -> None:
    assert [parts_per_million(text) for text in ("0.0000005", "0.0000015", "0.0000025")] == [0, 2, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "-inf", "", "one"])
def test_what_is_no_finite_number(value: float | str) -> None:
    with pytest.raises(ValueError, match="is not a finite decimal number"):
        parts_per_million(value)


def test_the_threads_own_decimal_context_has_no_part_in_it() -> None:
    with localcontext() as context:
        context.prec = 2
        context.traps[Inexact] = True
        assert parts_per_million("0.123456") == 123_456
        assert getcontext().prec == 2


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (-1, 4, 0)]
)
def test_quotients_rounded_up(numerator: int, denominator: int, expected: int) -> None:
    assert ceil_div(numerator, denominator) == expected
