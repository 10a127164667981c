"""Every number of the report from its definition."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.bench.statistics import concurrency, distribution, summarize
from eventlm.config.objectives import Objectives
from tests.bench.records import MS, record, result


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between the two samples beside the place (n - 1) p."""
    ordered = sorted(values)
    index = (len(ordered) - 1) * percent / 100
    below = math.floor(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (index - below)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_distribution(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.mean == pytest.approx(sum(values) / len(values))
    for percent, value in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99), (100, found.max)):
        assert value == pytest.approx(percentile(values, percent))


def test_no_distribution_of_nothing() -> None:
    assert distribution([]) is None


def test_latencies_count_from_the_intended_time() -> None:
    """TTFT 100 - 10, e2e 160 - 10, TPOT (150 - 90) / (4 - 1), although it was sent 30 ms late."""
    statistics = summarize(result(record(intended=10, sent=40, tokens=[100, 110, 140, 160])))
    assert statistics.ttft_ms is not None
    assert statistics.ttft_ms.mean == pytest.approx(90)
    assert statistics.e2e_ms is not None
    assert statistics.e2e_ms.mean == pytest.approx(150)
    assert statistics.tpot_ms is not None
    assert statistics.tpot_ms.mean == pytest.approx(20)
    assert statistics.inter_token_ms is not None
    assert statistics.inter_token_ms.mean == pytest.approx((10 + 30 + 20) / 3)
    assert statistics.inter_token_ms.p50 == pytest.approx(20)
    assert statistics.late_ms is not None
    assert statistics.late_ms.max == pytest.approx(30)


def test_tokens_that_came_together_count_for_tpot() -> None:
    """The server counts five tokens in three events."""
    statistics = summarize(result(record(intended=0, tokens=[10, 20, 50], output_tokens=5)))
    assert statistics.tpot_ms is not None
    assert statistics.tpot_ms.mean == pytest.approx((50 - 10) / 4)
    assert statistics.output_tokens == 5


def test_a_single_token_has_no_tpot_and_no_gaps() -> None:
    statistics = summarize(result(record(intended=0, tokens=[25])))
    assert statistics.tpot_ms is None
    assert statistics.inter_token_ms is None
    assert statistics.ttft_ms is not None
    assert statistics.ttft_ms.mean == statistics.e2e_ms.mean == pytest.approx(25)  # type: ignore[union-attr]


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    statistics = summarize(result(record(intended=5, tokens=[], end=30, output_tokens=1)))
    assert statistics.ttft_ms is not None
    assert statistics.ttft_ms.mean == pytest.approx(25)


def test_rates_are_of_successes_over_the_duration() -> None:
    good = [record(index, intended=0, tokens=[10, 20], prompt_tokens=7) for index in range(6)]
    bad = [
        record(6, intended=0, tokens=[10, 20], error="http 429"),
        record(7, intended=0, tokens=[], end=1, error="http 429"),
        record(8, intended=0, tokens=[], end=1, error="connection"),
    ]
    statistics = summarize(result(*good, *bad, duration=500, cpu_ns=50 * MS))
    assert (statistics.num_requests, statistics.num_success) == (9, 6)
    assert statistics.errors == {"http 429": 2, "connection": 1}
    assert (statistics.prompt_tokens, statistics.output_tokens) == (42, 12)
    assert statistics.requests_per_second == pytest.approx(6 / 0.5)
    assert statistics.output_tokens_per_second == pytest.approx(12 / 0.5)
    assert statistics.total_tokens_per_second == pytest.approx(54 / 0.5)
    assert statistics.cpu_share == pytest.approx(0.1)


def test_retries_and_kernels() -> None:
    statistics = summarize(
        result(
            record(0, intended=0, tokens=[10], retried=["http 429", "http 500"], post_kernel_ns=3 * MS),
            record(1, intended=0, tokens=[], end=1, retried=["http 500"], error="http 500"),
        )
    )
    assert statistics.retries == {"http 500": 2, "http 429": 1}
    assert statistics.errors == {"http 500": 1}
    assert statistics.post_kernel_ms is not None
    assert statistics.post_kernel_ms.mean == statistics.post_kernel_ms.p95 == 3.0


def test_goodput() -> None:
    """Of five requests one is late, one slow, one failed: two are good in two seconds."""
    records = [
        record(0, intended=0, tokens=[100, 110]),
        record(1, intended=0, tokens=[100]),
        record(2, intended=0, tokens=[201, 202]),
        record(3, intended=0, tokens=[100, 151]),
        record(4, intended=0, tokens=[1, 2], error="broken"),
    ]
    statistics = summarize(result(*records, duration=2000), Objectives(ttft=200, tpot=50))
    assert statistics.goodput is not None
    assert statistics.goodput.requests_per_second == pytest.approx(1.0)
    assert statistics.goodput.share == pytest.approx(0.4)


def test_an_objective_is_met_at_its_limit() -> None:
    at_limit = record(intended=0, tokens=[100, 200])
    for objectives, share in ((Objectives(ttft=100, tpot=100, e2e=200), 1), (Objectives(e2e=199.9), 0)):
        goodput = summarize(result(at_limit, duration=1000), objectives).goodput
        assert goodput is not None
        assert goodput.share == share


def test_offered_and_sent_rates() -> None:
    """Three requests were to be sent over 100 ms, and left over 200 ms."""
    records = [record(index, intended=index * 50, sent=index * 100, tokens=[900]) for index in range(3)]
    statistics = summarize(result(*records))
    assert statistics.drawn_rate == pytest.approx(2 / 0.1)
    assert statistics.sent_rate == pytest.approx(2 / 0.2)


def test_concurrency() -> None:
    records = [
        record(0, intended=0, tokens=[100]),
        record(1, intended=50, tokens=[150]),
        record(2, intended=150, tokens=[200]),
    ]
    assert concurrency(records) == [(0, 1), (50 * MS, 2), (100 * MS, 1), (150 * MS, 1), (200 * MS, 0)]
    statistics = summarize(result(*records, duration=200))
    assert statistics.peak_concurrency == 2
    assert statistics.mean_concurrency == pytest.approx((100 + 100 + 50) / 200)


def test_nothing_at_all() -> None:
    statistics = summarize(result(duration=0), Objectives(ttft=1))
    assert statistics.requests_per_second == 0
    assert statistics.ttft_ms is None
    assert statistics.goodput is not None
    assert statistics.goodput.share == 0
