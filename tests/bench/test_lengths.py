"""Lengths as the command line takes them, and the distributions that they name."""

from __future__ import annotations

import math

import numpy
import pytest
from scipy import stats

from eventlm.bench.lengths import parse_lengths
from eventlm.bench.random_streams import random_stream
from eventlm.errors import UsageError


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
