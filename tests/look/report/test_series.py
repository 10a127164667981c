"""Points over time: no peak is lost, and rates add up to what the run did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from eventlm.look.report.series import MAX_POINTS, over_time, rates, thinned
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from eventlm.replay.index.tables import MarkKind
from tests.replay.index.runs import record_ranks


def test_peaks_are_kept() -> None:
    draw = np.random.default_rng(1)
    times = np.cumsum(draw.integers(1, 1_000, 50_000))
    values = np.cumsum(draw.integers(-3, 4, len(times)))
    found = thinned(times, {"a": values, "b": -values})
    assert len(found["time"]) <= MAX_POINTS
    assert (np.diff(found["time"]) > 0).all()
    for name, column in (("a", values), ("b", -values)):
        assert (found[name].min(), found[name].max()) == (column.min(), column.max())
    # In each bucket both extremes are there.
    size = MAX_POINTS // 2
    buckets = (times - times[0]) * size // (times[-1] - times[0] + 1)
    kept = (found["time"] - times[0]) * size // (times[-1] - times[0] + 1)
    for bucket in (0, 17, size - 1):
        own, shown = values[buckets == bucket], found["a"][kept == bucket]
        assert (own.min(), own.max()) == (shown.min(), shown.max())


def test_few_points_stay_as_they_are() -> None:
    times = np.array([1, 5, 9])
    found = thinned(times, {"a": times * 2}, max_points=3)
    assert found["time"].tolist() == [1, 5, 9]
    assert found["a"].tolist() == [2, 10, 18]


def test_rates_add_up(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("oscillating_eviction")
    found = rates(index, 0)
    span_ns = index.facts.last_ns
    widths = np.diff(np.append(found["time"], span_ns))
    tokens = (found["output"] * widths).sum() / 1e9
    assert abs(tokens - index.steps["emitted"].sum()) <= len(widths)
    assert found["arrivals"].sum() == 400
    assert found["preemptions"].sum() == (index.marks["kind"] == MarkKind.PREEMPTED).sum()
    busy = found["batch"] >= 0
    assert 100 <= found["batch"][busy].min() <= found["batch"][busy].max() <= 100 * index.header.core.max_num_seqs
    assert found["hit_ppm"].max() <= 1_000_000


def test_what_the_page_gets(planted_index: Callable[[str], Index]) -> None:
    found = over_time(planted_index("one_sided_router"), 0)
    names = [column["name"] for column in found["gauges"]["columns"]]
    assert names[:4] == ["time", "waiting", "running", "partial"]
    assert {"waiting.0", "waiting.1", "running.0", "running.1"} <= set(names)
    assert found["known"] == ["waiting", "running", "partial", "free", "held", "cached"]
    assert found["gauges"]["rows"] <= MAX_POINTS


def test_a_lost_rank_has_its_name(tmp_path: Path) -> None:
    labels = [mark["label"] for mark in over_time(open_index(record_ranks(tmp_path)), 0)["marks"]]
    assert "rank 0 of replica 1 lost" in labels
