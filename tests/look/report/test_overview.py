"""The head of a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.look.report import overview
from eventlm.look.report.measures import measure
from eventlm.metrics.trace_metrics import TraceStats, trace_stats
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.types import TimeWindow
from tests.look.report.runs import GOLDEN, record_with_gap, write_empty
from tests.replay.golden import FOLDER
from tests.replay.replicaset_runs import made_sets
from tests.replay.workload_runs import record


def test_figures_are_those_of_the_metrics(
    planted_run: Callable[[str], Path], planted_index: Callable[[str], Index]
) -> None:
    index, stats = planted_index("starving_key"), trace_stats(planted_run("starving_key"))
    figures = {each["label"]: each["value"] for each in overview.headline(index, measure(index), 0)}
    tokens = sum(replica.generation_tokens for replica in stats.snapshot.replicas)
    preemptions = sum(sum(replica.preempt_reasons.values()) for replica in stats.snapshot.replicas)
    assert figures["requests"] == f"{stats.snapshot.num_requests:,}"
    assert figures["output tokens"] == f"{tokens:,}"
    assert figures["preemptions"] == f"{preemptions:,}"
    assert {each["reason"]: each["count"] for each in overview.endings(index)} == stats.finish_reasons


def _assert_as_stats(index: Index, stats: TraceStats, base_ns: int) -> None:
    figures = {each["label"]: each for each in overview.headline(index, measure(index), base_ns)}
    of = stats.snapshot.replicas
    assert figures["output tokens"]["value"] == f"{sum(replica.generation_tokens for replica in of):,}"
    assert figures["busy"]["note"] == f"{stats.values['batch_size'].total():,} steps"
    for row, replica in zip(overview.replica_rows(index, base_ns), of, strict=True):
        assert row["output"] == replica.generation_tokens
        assert row["busyPpm"] == replica.busy_ns * 1_000_000 // stats.snapshot.duration_ns
        assert row["lost"] == replica.num_workers_lost


def test_parts_of_runs_are_as_in_trace_stats(tmp_path: Path) -> None:
    path, window = FOLDER / "edf_tight.jsonl", TimeWindow(20_000_000, 50_000_000)
    _assert_as_stats(windowed(open_index(path), window), trace_stats(path, window=window), window.from_ns)
    record(tmp_path, 5)
    path = tmp_path / "seed-5" / "trace.jsonl"
    index = open_index(path)
    _assert_as_stats(index, trace_stats(path), index.header.ts)


def test_events_that_are_not_there_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overview.details(open_index(GOLDEN), 0, is_part=True)[3].startswith("a part of ")
    index = open_index(record_with_gap(tmp_path, 1, monkeypatch))
    assert overview.details(index, 0)[3].startswith(f"events 0 to {index.facts.next_s - 1:,} with gaps, ")


def test_replicas(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("one_sided_router")
    first, second = overview.replica_rows(index, 0)
    assert (first["model"], second["model"]) == ("", "")
    assert (first["sequences"], second["sequences"]) == (400, 0)
    assert first["steps"] == len(index.steps)
    assert (second["batch"], second["hitPpm"], second["busyPpm"]) == (None, None, 0)
    assert 900_000 < first["busyPpm"] <= 1_000_000


def test_what_ran_and_under_which_settings(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    rows = {(row["section"], row["name"]): row["value"] for row in overview.limits(index)}
    assert ("policy", "tests.look.planted:StarvingKey") in rows
    assert rows["core", "max_num_seqs"] == "4"
    assert {row["section"] for row in overview.settings(index)} >= {"scheduler", "cache"}
    assert index.header.run in overview.title(index)
    assert overview.details(index, 0)[0] == "400 requests"


def test_all_replicasets_are_described(tmp_path: Path) -> None:
    index = open_index(made_sets(tmp_path, num_requests=4))
    assert overview.title(index) == f"made, other, run {index.header.run}"
    rows = {(row["section"], row["name"]): row["value"] for row in overview.limits(index)}
    assert (rows["main: core", "block_size"], rows["small: core", "block_size"]) == ("16", "8")
    assert ("main: policy", "fcfs") in rows
    assert ("small: policy", "edf") in rows
    assert {row["section"] for row in overview.settings(index)} >= {"host", "small: host"}
    assert [row["model"] for row in overview.replica_rows(index, 0)] == ["made", "other", "other"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    unverified = open_index(GOLDEN, verify=False)
    assert any("--no-verify" in notice["text"] for notice in overview.notices(unverified, 0))
    empty = open_index(write_empty(tmp_path / "empty.jsonl"))
    assert [notice["text"] for notice in overview.notices(empty, 0)] == ["No request arrived."]
    assert overview.headline(empty, measure(empty), 0)[0]["value"] == "0"
    assert "2 s after" in overview.notices(unverified, 2_000_000_000)[-1]["text"]
