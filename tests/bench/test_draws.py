"""What a load test draws: random streams, lengths, and arrivals as the distributions that they are named after."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy
import pytest
from scipy import stats

from eventlm.bench.draws import ArrivalProcess, arrival_times, parse_lengths, random_stream
from eventlm.errors import UsageError


def numbers(seed: int, *name: str | int) -> list[int]:
    return [int(value) for value in random_stream(seed, *name).integers(2**60, size=4)]


def test_a_stream_follows_from_seed_and_name() -> None:
    assert numbers(7, "prompt", 3) == numbers(7, "prompt", 3)


def test_seeds_and_names_make_different_streams() -> None:
    streams = [
        numbers(0, "a"),
        numbers(1, "a"),
        numbers(0, "b"),
        numbers(0, "a", 0),
        numbers(0, "a", 1),
        numbers(0, "a", "1"),
    ]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_a_seed_means_the_same_tomorrow() -> None:
    """A load that is named by its seed can be put on another server, by another version."""
    assert numbers(0, "arrivals")[:2] == [503191758321155395, 8278814634541808]


def draws(text: str, count: int = 3000) -> list[int]:
    lengths, random = parse_lengths(text, "--input-len"), random_stream(1, "lengths")
    return [lengths.draw(random) for _ in range(count)]


def test_fixed() -> None:
    assert set(draws("17")) == {17}
    assert set(draws("fixed:length=17")) == {17}


def test_uniform_reaches_both_ends() -> None:
    counts = numpy.bincount(draws("uniform:min=3,max=6"), minlength=7)
    assert list(counts[:3]) == [0, 0, 0]
    assert stats.chisquare(counts[3:]).pvalue > 0.001


def test_normal() -> None:
    drawn = draws("normal:mean=400,std=50")
    assert numpy.mean(drawn) == pytest.approx(400, rel=0.01)
    assert numpy.std(drawn) == pytest.approx(50, rel=0.05)


def test_lognormal() -> None:
    logs = numpy.log(draws("lognormal:median=500,sigma=0.5"))
    assert stats.kstest(logs, stats.norm(math.log(500), 0.5).cdf).pvalue > 0.001


def test_limits() -> None:
    drawn = draws("normal:mean=10,std=50,min=5,max=40")
    assert (min(drawn), max(drawn)) == (5, 40)
    assert min(draws("normal:mean=2,std=50")) == 1


@pytest.mark.parametrize("text", ["17", "uniform:min=3,max=6", "lognormal:median=500,sigma=0.5,max=900"])
def test_names_itself(text: str) -> None:
    assert str(parse_lengths(text, "--input-len")) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1 token"),
        ("-4", "at least 1 token"),
        ("many", "is not a length; write N"),
        ("", "names no plug-in"),
        ("gaussian:mean=3", "is not a length"),
        ("uniform:min=3", "max is missing"),
        ("uniform:min=9,max=3", "min is above max"),
        ("uniform:min=0,max=3", "min must be at least 1"),
        ("normal:mean=3,std=-1", "std must not be below 0"),
        ("normal:mean=3,std=x", "std=x is no parameter"),
        ("normal:mean=3,sd=1", "sd=1 is no parameter"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_lengths(text, "--input-len")


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
