"""Latencies of an index, against those of `eventlm trace stats`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.look.report.measures import MEASURES, measure, percentile_rows
from eventlm.metrics.trace_metrics import TraceStats, trace_stats
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.types import TimeWindow
from tests.look.report.runs import record_with_gap
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.workload_runs import record

METRICS = {
    "ttft": "prefill_e2e_time",
    "tpot": "request_time_per_output_token",
    "e2e": "request_e2e_time",
    "queue": "request_scheduling_delay",
}


def assert_as_stats(index: Index, stats: TraceStats) -> None:
    measures = measure(index)
    for name in MEASURES:
        assert measures.distribution(name) == stats.distributions.get(METRICS[name]), name
    rows = percentile_rows(index, measures)
    classes = {(row["group"], row["measure"]): row for row in rows if not row["isAll"]}
    expected = {
        (group, name): each
        for group, distributions in stats.classes.items()
        for name in MEASURES
        if (each := distributions.get(METRICS[name])) is not None
    }
    assert classes.keys() == expected.keys()
    for key, each in expected.items():
        for field in ("count", "p50", "p90", "p95", "p99", "max"):
            assert classes[key][field] == getattr(each, field), key


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_runs(name: str, verify: bool) -> None:
    path = FOLDER / f"{name}.jsonl"
    assert_as_stats(open_index(path, verify=verify), trace_stats(path))


@pytest.mark.parametrize("seed", [0, 5, 15, 23])
def test_random_runs_with_cuts_and_losses(tmp_path: Path, seed: int) -> None:
    """Text ends, cancellations, several samples, lost workers, rejections, and several segments."""
    record(tmp_path, seed)
    path = tmp_path / f"seed-{seed}"
    assert_as_stats(open_index(path), trace_stats(path))


def test_a_run_that_lost_its_beginning(tmp_path: Path) -> None:
    record(tmp_path, 5)
    path = tmp_path / "seed-5"
    assert_as_stats(open_index(path / "trace.jsonl"), trace_stats(path / "trace.jsonl"))


def test_a_run_with_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        path = record_with_gap(tmp_path, seed, monkeypatch)
        assert_as_stats(open_index(path), trace_stats(path))


def test_a_window(planted_run: Callable[[str], Path], planted_index: Callable[[str], Index]) -> None:
    path, index = planted_run("starving_key"), planted_index("starving_key")
    for window in (TimeWindow(2_000_000_000, 5_000_000_000), TimeWindow(4_000_000_000, None)):
        assert_as_stats(windowed(index, window), trace_stats(path, window=window))
