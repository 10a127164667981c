"""Explanations from the middle of a run, against those from its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.indexed import explain_indexed
from eventlm.replay.index import indexer
from eventlm.replay.index.open import open_index
from eventlm.types import SequenceId
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.workload_runs import record

PLENTY = 1_000_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    # So that there are several in a short run.
    monkeypatch.setattr(indexer, "SNAPSHOT_EVENTS", 40)


def assert_alike(path: Path) -> None:
    index = open_index(path)
    assert len(index.snapshots) > 1
    columns = (index.requests[name].tolist() for name in ("request", "index"))
    identities = [SequenceId(*each) for each in zip(*columns, strict=True)]
    found = explain_indexed(index, identities[::3], max_events=PLENTY)
    assert list(found) == identities[::3]
    whole = explain(path, list(identities[::3]))
    assert list(found.values()) == whole.explanations


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_runs(name: str) -> None:
    assert_alike(FOLDER / f"{name}.jsonl")


@pytest.mark.parametrize("seed", [1, 5])
def test_random_runs(tmp_path: Path, seed: int) -> None:
    """The second is in many segments."""
    record(tmp_path, seed)
    assert_alike(tmp_path / f"seed-{seed}")


def test_as_many_as_the_budget_allows() -> None:
    index = open_index(FOLDER / "fcfs_one_replica.jsonl")
    requests = index.requests["request"].tolist()
    first, last = SequenceId(requests[0], 0), SequenceId(requests[-1], 0)
    spans = [int(index.requests["ended_s"][row]) for row in (0, -1)]
    num_first = spans[0] + 1 - index.facts.first_s
    assert list(explain_indexed(index, [first, last], max_events=num_first)) == [first]
    # One that is too long is left out, those behind it are not.
    assert list(explain_indexed(index, [SequenceId(1_000_000, 0), first], max_events=num_first)) == [first]
    assert explain_indexed(index, [last], max_events=10) == {}


def test_a_run_that_is_not_verified_has_none() -> None:
    index = open_index(FOLDER / "fcfs_one_replica.jsonl", verify=False)
    assert explain_indexed(index, [SequenceId(int(index.requests["request"][0]), 0)], max_events=PLENTY) == {}
