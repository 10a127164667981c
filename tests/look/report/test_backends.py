"""Other servers in a report, against the metrics of the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eventlm.look.findings.find import find_all
from eventlm.look.report.backends import attempt_lanes, backend_rows, tokens_until
from eventlm.look.report.build import report_data
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.types import TimeWindow
from tests.replay.backend_runs import record_backends

#: Alone, before a set of own workers, and behind one.
SEEDS = (9, 4, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_are_those_of_the_metrics(seed: int, tmp_path: Path) -> None:
    path = record_backends(tmp_path, seed)
    index, replicas = open_index(path), trace_stats(path).snapshot.replicas
    rows = {row["replica"]: row for row in backend_rows(index, 0)}
    expected = {number: each.backend for number, each in enumerate(replicas) if each.backend is not None}
    assert rows.keys() == expected.keys()
    for replica, row in rows.items():
        backend = expected[replica]
        assert row["backend"] == backend.name
        assert (row["attempts"], row["answered"]) == (backend.num_attempts, backend.num_answers)
        assert (row["failed"], row["withdrawn"]) == (sum(backend.failures.values()), backend.num_withdrawn)
        assert (row["retries"], row["hedges"]) == (backend.num_retries, backend.num_hedges)
        assert row["output"] == backend.generation_tokens
    assert sum(row["attempts"] for row in rows.values()) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_have_each_attempt_once_and_none_overlap(seed: int, tmp_path: Path) -> None:
    index = open_index(record_backends(tmp_path, seed))
    lanes = attempt_lanes(index, 0, index.facts.last_ns)
    columns = lanes.columns
    same_lane = np.diff(columns["lane"]) == 0
    assert (columns["start"][1:][same_lane] >= columns["end"][:-1][same_lane]).all()
    starts = np.flatnonzero(np.isin(columns["start"], index.attempts["sent_ns"]))
    assert len(starts) >= len(index.attempts) > 5
    assert columns["lane"].max() == len(lanes.names) - 1
    assert lanes.names[0] == f"backend {index.attempts['replica'].min()}"


def test_tokens_are_sent_between_the_first_and_the_end(tmp_path: Path) -> None:
    index = open_index(record_backends(tmp_path, 9))
    last_ns = index.facts.last_ns
    found = tokens_until(index, np.linspace(0, last_ns, 50).astype(np.int64))
    assert (np.diff(found) >= 0).all()
    assert (found[0], found[-1]) == (0, (index.attempts["total"] - index.attempts["before"]).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_says_nothing_of_steps_that_are_not_there(seed: int, tmp_path: Path) -> None:
    index = open_index(record_backends(tmp_path, seed))
    data = report_data(index, find_all(index), str(tmp_path), None)
    labels = {figure["label"] for figure in data["headline"]}
    has_workers = seed != 9
    assert ("busy" in labels) == ("preemptions" in labels) == has_workers
    assert {"attempts at backends", "failed attempts"} <= labels
    assert bool(data["replicas"]) == has_workers
    assert data["backends"]
    assert ("held" in data["series"]["known"]) == has_workers
    assert data["timeline"]["laneNouns"].count("request") == len([*data["timeline"]["laneNames"]]) - data["timeline"][
        "laneNouns"
    ].count("step")


def test_a_window_has_its_part(tmp_path: Path) -> None:
    index = open_index(record_backends(tmp_path, 9))
    middle = int(np.median(index.requests["arrived_ns"]))
    parts = [windowed(index, TimeWindow(0, middle)), windowed(index, TimeWindow(middle, None))]
    assert sum(len(part.attempts) for part in parts) == len(index.attempts)
    assert all(backend_rows(part, 0) for part in parts)
