from __future__ import annotations

from math import sqrt

import pytest

from eventlm.replay.what_if.error_bars import STUDENT_T, Measured, Value, error_bars, middle


def metric(
    recorded: Value, *engines: list[Value], family: str = "", is_relative: bool = False, resolution: float = 0.0
) -> Measured:
    """Of a baseline, a second witness and whatever alternatives there are."""
    return Measured(family, is_relative, resolution, recorded, list(engines))


def test_the_middle_is_a_value_that_was_drawn() -> None:
    assert middle([3, None, 1, 2]) == 2
    assert middle([4, 1]) == 4
    assert middle([None]) is None
    assert middle([]) is None


def test_one_draw_has_the_models_error_alone() -> None:
    assert error_bars([metric(100, [97], [101], [50])]) == [[3, 3, 3]]
    # The second witness counts where it is farther off.
    assert error_bars([metric(100, [97], [110], [50])]) == [[10, 10, 10]]


def test_draws_widen_the_bar_by_what_one_more_of_them_may_be_off() -> None:
    draws: list[Value] = [10, 12, 14]
    spread = STUDENT_T[3] * 2 * sqrt(1 + 1 / 3)
    bars = error_bars([metric(12, [12], [12], draws)])
    assert bars[0] == pytest.approx([0, 0, spread])


def test_nothing_to_measure_has_no_bar() -> None:
    assert error_bars([metric(None, [1], [1], [1])]) == [[None, None, None]]
    assert error_bars([metric(5, [None], [4], [3])]) == [[None, None, None]]
    assert error_bars([metric(5, [5], [5], [None])]) == [[0, 0, None]]


def test_no_bar_is_below_the_resolution() -> None:
    assert error_bars([metric(5, [5], [5], [5], resolution=1)]) == [[1, 1, 1]]


def test_a_lucky_metric_has_the_error_of_its_family() -> None:
    """Relative to the larger of its value and the baseline's."""
    metrics = [
        metric(100, [80], [100], [50], family="latency", is_relative=True),
        metric(100, [90], [100], [200], family="latency", is_relative=True),
        metric(10, [10], [10], [40], family="latency", is_relative=True),
        metric(10, [10], [10], [40]),
    ]
    bars = error_bars(metrics)
    # Errors are 20, 10 and 0 %: the median is 10 %.
    assert bars[0] == pytest.approx([20, 20, 20])
    assert bars[1] == pytest.approx([10, 10, 20])
    assert bars[2] == pytest.approx([1, 1, 4])
    assert bars[3] == [0, 0, 0]
