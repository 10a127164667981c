"""What findings are computed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.look.findings.find import find_all
from eventlm.look.findings.finding import RunColumns, lost_workers, unseen
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.report.runs import record_with_gap
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.workload_runs import record


def test_times_add_up_and_plugins_are_named(planted_index: Callable[[str], Index]) -> None:
    run = RunColumns(planted_index("one_sided_router"))
    assert run.time(run.drain_ns >= 0) == run.total_ns == run.index.facts.last_ns - int(run.index.drains["ts"][0])
    assert run.plugin("router") == "router tests.look.planted:OneSidedRouter"
    assert run.plugin("policy") == "policy fcfs"
    assert (run.waited_ns <= run.e2e_ns).all()
    assert run.share_ppm(1, 0) == 0
    drain = run.index.drains.row(3)
    assert [run.planned_s(drain[name]) for name in ("s", "next_s")] == run.index.drains["s"][3:5].tolist()
    assert run.planned_s(run.index.facts.next_s) == run.index.facts.next_s


def test_what_was_admitted_before_the_log_did_not_wait(tmp_path: Path) -> None:
    record(tmp_path, 5)
    index = open_index(tmp_path / "seed-5" / "trace.jsonl")
    run, is_unseen = RunColumns(index), unseen(index)
    assert is_unseen.any()
    assert not run.waited_ns[is_unseen].any()
    assert not run.has_wait[is_unseen].any()
    assert "saturation" not in {finding.kind for finding in find_all(index)}


def test_nor_did_what_a_gap_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(record_with_gap(tmp_path, 1, monkeypatch))
    run, is_unseen = RunColumns(index), unseen(index)
    assert (is_unseen & ~run.launched).any()
    assert not run.waited_ns[is_unseen].any()


@pytest.mark.parametrize("name", list(GOLDEN))
def test_workers_are_lost_once(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    expected = [replica.num_workers_lost for replica in trace_stats(path).snapshot.replicas]
    index = open_index(path)
    lost = index.marks["replica"][lost_workers(index)].tolist()
    assert [lost.count(replica) for replica in range(len(expected))] == expected
