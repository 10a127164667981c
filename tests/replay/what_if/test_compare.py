"""Comparisons: classes of lengths, error bars, what is significant, who won and who lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from eventlm.replay.outcome import RunOutcome, SequenceOutcome
from eventlm.replay.what_if.compare import (
    MAX_SERVICE_CLASSES,
    Comparison,
    Metric,
    Ran,
    compare,
    length_classes,
    service_classes,
)
from eventlm.replay.workload.workload import SequenceOutput, Workload
from tests.made_requests import changed
from tests.replay.what_if_runs import requests_of

MILLISECOND = 1_000_000


def ran(e2e_ms: Sequence[float], *, cut: Sequence[int] = (), preemptions: int = 0, rejected: int = 0) -> Ran:
    """A run of requests that took so long; those whose place is in `cut` were cancelled. Times grow with the seq."""
    sequences = [
        SequenceOutcome(
            request=index + 1,
            index=0,
            reason="cancelled" if index in cut else "length",
            service_class="",
            prompt_tokens=100,
            output_tokens=10,
            cached_tokens=0,
            arrived_ns=0,
            ended_ns=0,
            e2e_ns=round(ms * MILLISECOND),
            ttft_ns=round(ms * MILLISECOND / 2),
            tpot_ns=MILLISECOND,
            queue_ns=0,
            num_preemptions=0,
            met_deadline=None,
            met_objectives=None,
            tokens_in_time=None,
        )
        for index, ms in enumerate(e2e_ms)
    ]
    outcome = RunOutcome(
        sequences=sequences,
        rejections=[],
        num_requests=len(e2e_ms) + rejected,
        num_unfinished=0,
        reject_reasons={"queue_full": rejected} if rejected else {},
        duration_ns=1_000 * MILLISECOND,
        num_steps=10,
        busy_ns=0,
        output_tokens=10 * len(e2e_ms),
        num_preemptions=preemptions,
        hit_tokens=0,
        queried_tokens=0,
    )
    return Ran(outcome, {index + 1: index for index in range(len(e2e_ms))}, 0)


def compare_once(
    workload: Workload, recorded: Ran, baseline: Ran, alternatives: Sequence[Ran], unpaced: Ran | None = None
) -> Comparison:
    """With one draw."""
    return compare(
        workload, recorded, [baseline], [[each] for each in alternatives], unpaced=[unpaced] if unpaced else []
    )


def workload(num_requests: int) -> Workload:
    return requests_of(range(num_requests))


def metric(comparison: Comparison, name: str) -> Metric:
    return next(each for each in comparison.metrics if each.name == name)


def test_the_error_bar_is_what_the_baseline_is_off_by() -> None:
    recorded, baseline = [100.0] * 10, [110.0] * 10
    found = compare_once(
        workload(10), ran(recorded), ran(baseline), [ran([115.0] * 10), ran([130.0] * 10), ran([90.0] * 10)]
    )
    e2e = metric(found, "e2e_p50")
    assert (e2e.recorded, e2e.baseline) == (100 * MILLISECOND, 110 * MILLISECOND)
    # A tenth, of the baseline.
    assert e2e.error_bar == pytest.approx(11 * MILLISECOND)
    assert [cell.difference for cell in e2e.alternatives] == [5 * MILLISECOND, 20 * MILLISECOND, -20 * MILLISECOND]
    assert [cell.is_significant for cell in e2e.alternatives] == [False, True, True]


def test_a_quantile_that_is_right_by_luck_gets_the_middle_error_of_its_latency() -> None:
    recorded = [float(100 + index) for index in range(100)]
    # The median is as recorded, p90 and p99 are off by a tenth and by a fifth.
    baseline = [ms if ms < 180 else ms * 1.1 if ms < 195 else ms * 1.2 for ms in recorded]
    found = compare_once(workload(100), ran(recorded), ran(baseline), [ran([ms * 1.05 for ms in baseline])])
    bars = {name: metric(found, f"e2e_{name}") for name in ("p50", "p90", "p99")}
    errors = {name: (each.error_bar or 0) / (each.baseline or 1) for name, each in bars.items()}
    assert errors["p50"] == pytest.approx(0.1, abs=1e-3)
    assert errors["p90"] == pytest.approx(0.1, abs=1e-3)
    assert errors["p99"] == pytest.approx(0.2, abs=1e-3)
    assert not bars["p50"].alternatives[0].is_significant


def test_the_larger_error_of_two_witnesses_is_the_bar() -> None:
    recorded, paced, unpaced = ran([100.0] * 10), ran([100.0] * 10, preemptions=1), ran([80.0] * 10, preemptions=4)
    found = compare_once(workload(10), recorded, paced, [ran([110.0] * 10), ran([130.0] * 10)], unpaced=unpaced)
    e2e, preemptions = metric(found, "e2e_p50"), metric(found, "preemptions")
    assert (e2e.baseline, e2e.baseline_unpaced) == (100 * MILLISECOND, 80 * MILLISECOND)
    assert e2e.error_bar == pytest.approx(20 * MILLISECOND)
    assert [cell.is_significant for cell in e2e.alternatives] == [False, True]
    assert preemptions.error_bar == 4
    assert found.request_error == pytest.approx(0.2)
    assert [(each.num_won, each.num_lost) for each in found.won_lost] == [(0, 0), (0, 10)]


def test_what_is_under_way_where_the_record_ends_is_in_no_latency() -> None:
    """Not even where a fast alternative brings it to an end."""
    whole = workload(3)
    unfinished = [structs.replace(whole.requests[0], is_unfinished=True), *whole.requests[1:]]
    times = [1.0, 100.0, 100.0]
    found = compare_once(
        structs.replace(whole, requests=unfinished),
        ran(times, cut=[0]),
        ran(times, cut=[0]),
        [ran(times, cut=[0]), ran(times)],
    )
    for name in ("e2e_p50", "ttft_p50"):
        assert [cell.difference for cell in metric(found, name).alternatives] == [0, 0]
    assert [each.num_censored for each in found.won_lost] == [1, 1]


def test_a_drawn_length_counts_for_latencies_but_neither_wins_nor_loses() -> None:
    whole = workload(3)
    drawn = structs.replace(whole.requests[0], outputs=[SequenceOutput(seen_tokens=0)])
    whole = structs.replace(whole, requests=[drawn, *whole.requests[1:]])
    found = compare_once(whole, ran([300.0, 100.0, 200.0], cut=[0]), ran([90.0] * 3), [ran([30.0, 60.0, 60.0])])
    e2e = metric(found, "e2e_p99")
    assert (e2e.recorded, e2e.baseline) == (200 * MILLISECOND, 90 * MILLISECOND)
    assert metric(found, "e2e_p50").alternatives[0].value == 60 * MILLISECOND
    counts = found.won_lost[0]
    assert (counts.num_won + counts.num_equal, counts.num_lost, counts.num_censored) == (2, 0, 1)
    assert found.num_censored == 1


def test_the_spread_over_the_draws_is_in_the_error_bar() -> None:
    recorded = ran([100.0] * 10)
    baseline = [ran([ms] * 10) for ms in (100.0, 100.0, 100.0, 100.0, 100.0)]
    steady = [ran([150.0] * 10)] * 5
    spread = [ran([ms] * 10) for ms in (110.0, 150.0, 130.0, 190.0, 170.0)]
    found = compare(workload(10), recorded, baseline, [steady, spread])
    e2e = metric(found, "e2e_p50")
    assert found.num_draws == 5
    assert e2e.error_bar == 0
    assert [cell.value for cell in e2e.alternatives] == [150 * MILLISECOND, 150 * MILLISECOND]
    assert [cell.is_significant for cell in e2e.alternatives] == [True, False]
    assert e2e.alternatives[0].error_bar == 0
    # The standard deviation is 31.6 ms; a further draw lies within 2.132 x 31.6 x sqrt(1.2) of their mean.
    assert e2e.alternatives[1].error_bar == pytest.approx(73.9 * MILLISECOND, rel=1e-3)


def test_the_error_of_an_alternative_grows_with_its_value() -> None:
    found = metric(compare_once(workload(10), ran([100.0] * 10), ran([110.0] * 10), [ran([440.0] * 10)]), "e2e_p50")
    assert found.alternatives[0].error_bar == pytest.approx(44 * MILLISECOND)


def test_counts_have_bars_of_their_own() -> None:
    runs = [ran([100.0] * 4, preemptions=count) for count in (5, 7, 9, 10, 7)]
    found = metric(compare_once(workload(4), runs[0], runs[1], runs[2:]), "preemptions")
    assert found.error_bar == 2
    assert [cell.difference for cell in found.alternatives] == [2, 3, 0]
    assert [cell.is_significant for cell in found.alternatives] == [False, True, False]


def test_what_is_not_measured_is_nothing() -> None:
    found = compare_once(workload(2), ran([10.0, 20.0]), ran([10.0, 20.0]), [ran([10.0, 20.0], cut=[0, 1])])
    for name in ("slo_met", "deadlines_met", "fluidity_index"):
        assert (metric(found, name).recorded, metric(found, name).error_bar) == (None, None)
        assert not metric(found, name).alternatives[0].is_significant
    cell = metric(found, "ttft_p50").alternatives[0]
    assert (cell.value, cell.difference, cell.is_significant) == (None, None, False)


def test_won_and_lost_are_by_more_than_nine_in_ten_requests_are_off() -> None:
    recorded = [100.0] * 20
    # Nine in ten are off by at most 10 %.
    baseline = [101.0] * 10 + [110.0] * 8 + [150.0] * 2
    alternative = [50.0, 105.0, 120.0, *baseline[3:]]
    found = compare_once(workload(20), ran(recorded), ran(baseline), [ran(alternative), ran(baseline)])
    assert found.request_error == pytest.approx(0.1)
    assert [(each.num_won, each.num_lost, each.num_equal) for each in found.won_lost] == [(1, 1, 18), (0, 0, 20)]


def test_requests_cut_short_anywhere_are_not_compared() -> None:
    times = [100.0, 200.0, 300.0]
    found = compare_once(workload(3), ran(times), ran(times, cut=[0]), [ran([1.0, 1.0, 1.0], cut=[1]), ran(times)])
    assert [(each.num_won, each.num_censored) for each in found.won_lost] == [(1, 2), (0, 1)]


def test_length_classes_are_the_shorter_half_the_longest_tenth_and_the_rest() -> None:
    found = length_classes(list(range(1, 101)))
    assert [(each.name, each.min_tokens, each.max_tokens, each.num_requests) for each in found] == [
        ("short", 1, 50, 50),
        ("medium", 51, 90, 40),
        ("long", 91, 100, 10),
    ]
    assert [(each.name, each.num_requests) for each in length_classes([7] * 9)] == [("short", 9)]
    # Equal lengths are in one class.
    skewed = length_classes([5] * 70 + [9] * 30)
    assert [(each.name, each.min_tokens, each.num_requests) for each in skewed] == [("short", 5, 70), ("medium", 9, 30)]
    assert [(each.name, each.max_tokens) for each in length_classes([3])] == [("short", 3)]


def classed(names: Sequence[str]) -> Workload:
    requests = [
        structs.replace(request, arrival=changed(request.arrival, service_class=name))
        for request, name in zip(workload(len(names)).requests, names, strict=True)
    ]
    return structs.replace(workload(len(names)), requests=requests)


def in_classes(run: Ran, names: Sequence[str]) -> Ran:
    """Those of gold met their deadline."""
    sequences = [
        structs.replace(each, service_class=name, met_deadline=name == "gold" if name else None)
        for each, name in zip(run.outcome.sequences, names, strict=True)
    ]
    return run._replace(outcome=structs.replace(run.outcome, sequences=sequences))


def test_each_service_class_is_reported() -> None:
    names = ["gold", "bronze", "", "bronze"]
    slow, fast = in_classes(ran([10, 40, 70, 40]), names), in_classes(ran([4, 80, 70, 80]), names)
    found = compare_once(classed(names), slow, slow, [fast])
    gold, bronze = metric(found, "ttft_p99_class_gold"), metric(found, "ttft_p99_class_bronze")
    assert (gold.baseline, gold.alternatives[0].value) == (5 * MILLISECOND, 2 * MILLISECOND)
    assert (bronze.baseline, bronze.alternatives[0].value) == (20 * MILLISECOND, 40 * MILLISECOND)
    assert metric(found, "deadlines_met_class_gold").baseline == 1_000_000
    assert metric(found, "deadlines_met_class_bronze").baseline == 0
    assert metric(found, "slo_met_class_gold").baseline is None
    assert not [each.name for each in found.metrics if each.name.endswith("_class_")]


def test_the_largest_of_many_service_classes_are_reported() -> None:
    names = [f"class{number}" for number in range(MAX_SERVICE_CLASSES + 3)] + ["class9", "class10"]
    told = service_classes(classed(names))
    assert len(told) == MAX_SERVICE_CLASSES
    assert told[:2] == ["class0", "class1"]
    assert {"class9", "class10"} <= set(told)
