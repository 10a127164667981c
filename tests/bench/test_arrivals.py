"""Arrival processes against the distributions that they are named after."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy
import pytest
from scipy import stats

from eventlm.bench.arrivals import ArrivalProcess, arrival_times
from eventlm.bench.random_streams import random_stream
from eventlm.errors import UsageError

NUM = 4000


def intervals(process: ArrivalProcess, rate: float, burstiness: float = 1.0) -> list[float]:
    random = random_stream(3, "arrivals")
    times = list(islice(arrival_times(process, rate, burstiness=burstiness, random=random), NUM))
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def test_poisson_intervals_are_exponential() -> None:
    assert stats.kstest(intervals("poisson", 5.0), stats.expon(scale=1 / 5.0).cdf).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_intervals(burstiness: float) -> None:
    drawn = intervals("gamma", 8.0, burstiness)
    assert stats.kstest(drawn, stats.gamma(burstiness, scale=1 / (8.0 * burstiness)).cdf).pvalue > 0.001
    # The coefficient of variation is what burstiness stands for.
    assert numpy.std(drawn) / numpy.mean(drawn) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_poisson_ignores_burstiness() -> None:
    assert intervals("poisson", 5.0, 9.0) == intervals("poisson", 5.0)


def test_constant_intervals_are_equal() -> None:
    assert intervals("constant", 4.0) == pytest.approx([0.25] * NUM)


def test_everybody_at_once() -> None:
    assert set(intervals("poisson", float("inf"))) == {0.0}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(UsageError, match=r"--request-rate .* is not above 0"):
        arrival_times("poisson", rate, burstiness=1.0, random=random_stream(0))


@pytest.mark.parametrize("burstiness", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_burstiness(burstiness: float) -> None:
    with pytest.raises(UsageError, match="--burstiness"):
        arrival_times("gamma", 1.0, burstiness=burstiness, random=random_stream(0))
