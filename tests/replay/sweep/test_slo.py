"""Limits as people write them, and the capacity that follows from loads that keep them or do not."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.errors import UsageError
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.sweep.slo import Capacity, Limit, capacity, keeps, load_between, parse_limits
from tests.replay.made_workloads import COST, PREDICTOR, make_engine, make_workload

X = 1_000_000


def test_limits() -> None:
    assert parse_limits("p99_ttft=2000,p50_tpot=7.5") == [Limit("p99", "ttft", 2000.0), Limit("p50", "tpot", 7.5)]
    assert parse_limits("max_e2e=10000")[0].name == "max_e2e"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=2000", "such as p99_ttft=2000"),
        ("p42_ttft=2000", "p42_ttft is not a quantile"),
        ("p99_speed=1", "p99_speed is not a quantile"),
        ("p99_ttft=0", "above 0"),
        ("p99_ttft=soon", "above 0"),
        ("p99_ttft", "not of the form"),
    ],
)
def test_limits_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_limits(text)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({}, Capacity(None, None)),
        ({X: True}, Capacity(X, None)),
        ({X: True, 2 * X: True}, Capacity(2 * X, None)),
        ({X: True, 2 * X: False, 3 * X: False}, Capacity(X, 2 * X)),
        ({X: False, 2 * X: False}, Capacity(None, X)),
        # A load that keeps the limits above one that does not counts for nothing.
        ({X: True, 2 * X: False, 3 * X: True}, Capacity(X, 2 * X)),
        # Whatever the order in which they were run.
        ({2 * X: False, 3 * X // 2: True, X: True}, Capacity(3 * X // 2, 2 * X)),
    ],
)
def test_capacity(kept: dict[int, bool], expected: Capacity) -> None:
    assert capacity(kept) == expected


def test_bisection_finds_the_capacity() -> None:
    true_capacity = 1_371_000
    kept = {load: load <= true_capacity for load in (X, 2 * X)}
    num_steps = 0
    while (load := load_between(capacity(kept))) is not None:
        kept[load] = load <= true_capacity
        num_steps += 1
    found = capacity(kept)
    assert found.load_ppm is not None
    assert found.first_miss_ppm is not None
    assert found.load_ppm <= true_capacity < found.first_miss_ppm
    assert found.first_miss_ppm - found.load_ppm <= 1_400
    assert num_steps == 10


def test_there_is_nothing_between_where_all_keep_or_none_does() -> None:
    assert load_between(Capacity(X, None)) is None
    assert load_between(Capacity(None, X)) is None
    assert load_between(Capacity(X, X + 500)) is None


def test_who_turns_requests_away_keeps_no_limit() -> None:
    summary = simulate(make_workload(1), make_engine(), COST, predictor=PREDICTOR).summary
    ttft_ms = summary.latencies["ttft"].p99 / 1e6
    assert summary.reject_reasons.get("context_length")
    assert keeps(summary, [Limit("p99", "ttft", ttft_ms)])
    assert not keeps(summary, [Limit("p99", "ttft", ttft_ms), Limit("max", "e2e", 0.001)])
    assert not keeps(structs.replace(summary, reject_reasons={"queue_full": 1}), [Limit("p99", "ttft", ttft_ms)])
    assert not keeps(structs.replace(summary, num_complete=0), [])
