"""The report of a trace: exact quantiles, counts by reason, and gauges over time."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.metrics.rows import COMPLETED, Gauges
from eventlm.metrics.trace_metrics import COUNTS, REQUEST_METRICS, STEP_METRICS, distribution, trace_stats
from tests.engine.metrics_oracle import fold, gaps
from tests.replay.golden import FOLDER, GOLDEN


@pytest.mark.parametrize("size", [1, 2, 9, 100, 101, 1000])
def test_quantiles_are_values_by_nearest_rank(size: int) -> None:
    rng = random.Random(size)
    values = sorted(rng.choice([rng.randrange(10), rng.randrange(10**9)]) for _ in range(size))
    counts = {value: values.count(value) for value in values}
    found = distribution(counts)
    for percent, quantile in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        assert quantile == values[-(-size * percent // 100) - 1]
    assert (found.count, found.max) == (size, values[-1])
    assert found.mean == pytest.approx(sum(values) / size)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_trace_in_numbers(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    stats = trace_stats(path)
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    store, rows = fold(events)
    assert stats.snapshot == store.snapshot()
    assert stats.num_bytes == path.stat().st_size
    assert stats.warnings == []
    assert stats.values["decode_token_execution_plus_preemption_time"] == gaps(events)
    completed = [row for row in rows.requests.values() if row.reason in COMPLETED]
    assert stats.distributions["request_e2e_time"].count == len(completed)
    assert stats.distributions["request_e2e_time"].max == max(row.request_e2e_time for row in completed)
    with_token = [row for row in rows.requests.values() if row.prefill_e2e_time is not None]
    assert stats.distributions["prefill_e2e_time"].count == len(with_token)
    assert stats.distributions["batch_size"].count == len(rows.steps)
    assert sum(stats.finish_reasons.values()) == len(rows.requests)
    assert list(stats.finish_reasons.values()) == sorted(stats.finish_reasons.values(), reverse=True)
    # Where the live store has a histogram, both add up to the same.
    for metric in ("request_e2e_time", "batch_execution_time", "request_num_restarts", "inter_batch_delay"):
        total = sum(value * times for value, times in stats.values[metric].items())
        assert total == sum(replica.histograms[metric].total for replica in stats.snapshot.replicas)


def test_gauges_over_time_begin_and_end_with_nothing() -> None:
    for name in GOLDEN:
        for series in trace_stats(FOLDER / f"{name}.jsonl").series:
            assert series.gauges[0] == series.gauges[-1] == Gauges(0, 0, 0)
            assert series.gauges_ns == sorted(set(series.gauges_ns))
            assert max(gauges.num_held_blocks for gauges in series.gauges) > 0
            assert len(series.step_starts_ns) == len(series.step_ends_ns) == len(series.batch_sizes) > 0
            assert all(one != two for one, two in pairwise(series.gauges))


def test_a_torn_trace_is_measured_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes((FOLDER / "edf_tight.jsonl").read_bytes()[:20_000])
    stats = trace_stats(path)
    assert any("torn" in warning for warning in stats.warnings)
    assert 0 < stats.snapshot.num_events < 193


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the trace"):
        trace_stats(tmp_path / "missing.jsonl")


def test_every_metric_is_a_field_of_its_row() -> None:
    assert {*REQUEST_METRICS, *STEP_METRICS} > COUNTS
