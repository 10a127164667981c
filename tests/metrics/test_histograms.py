"""The table of histograms: what it declares is there to be measured, and bounds are exact."""

from __future__ import annotations

from eventlm.metrics.histograms import (
    HISTOGRAMS,
    TTFT,
    Histogram,
    fields_of,
    make_histograms,
    one_two_five_buckets,
    seconds,
)
from eventlm.metrics.rows import RequestRow, StepRow


def test_each_is_declared_once_and_has_a_source() -> None:
    assert len({family.key for family in HISTOGRAMS}) == len({family.name for family in HISTOGRAMS}) == len(HISTOGRAMS)
    assert {field for field, _ in fields_of("request")} <= set(dir(RequestRow))
    assert {field for field, _ in fields_of("step")} <= set(StepRow.__struct_fields__)
    assert [family.key for family in HISTOGRAMS if family.source == "event"] == [
        "prefill_e2e_time",
        "decode_token_execution_plus_preemption_time",
        "deadline_slack",
        "request_max_num_generation_tokens",
    ]


def test_bounds_are_exact() -> None:
    assert seconds("-.25 .001 7.5") == (-250_000_000, 1_000_000, 7_500_000_000)
    assert one_two_five_buckets(99) == (1, 2, 5, 10, 20, 50)
    assert one_two_five_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    made = make_histograms(20)
    assert made.keys() == {family.key for family in HISTOGRAMS}
    assert made["request_generation_tokens"].bounds == (1, 2, 5, 10, 20)
    assert made["prefill_e2e_time"].bounds == TTFT


def test_a_value_on_a_bound_counts_below_it() -> None:
    histogram = Histogram.over((1, 5))
    for value, count in ((1, 1), (2, 3), (5, 1), (6, 2)):
        histogram.observe(value, count)
    copy = histogram.copy()
    histogram.observe(0)
    assert (copy.counts, copy.total, sum(copy.counts)) == ([1, 4, 2], 24, 7)
    assert histogram.counts == [2, 4, 2]
