"""Findings name the cause of runs that were made bad in one way, and nothing in healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.look.findings.find import find_all
from eventlm.look.findings.finding import Finding
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.planted import PLANTED, make_load, record_load, record_sets

#: Twenty engines under loads that they can bear. Half as much load is for the soak tests where it is the same engine.
HEALTHY: list[tuple[dict[str, Any], float]] = [
    ({}, 8),
    ({}, 14),
    ({"policy": "lrs"}, 8),
    ({"policy": "lrs"}, 14),
    ({"policy": "edf"}, 8),
    ({"policy": "edf"}, 14),
    ({"policy": "lpm"}, 8),
    ({"policy": "lpm"}, 14),
    ({"batcher": "dynamic"}, 8),
    ({"batcher": "dynamic", "policy": "edf"}, 12),
    ({"batcher": "space_sharing"}, 8),
    ({"batcher": "space_sharing", "policy": "lrs"}, 12),
    ({"replicas": 2}, 16),
    ({"replicas": 2, "router": "least_loaded"}, 16),
    ({"replicas": 2, "router": "prefix_affinity"}, 24),
    ({"replicas": 3, "router": "prefix_affinity"}, 20),
    ({"replicas": 3, "router": "prefix_affinity", "policy": "lrs"}, 30),
    ({"max_num_seqs": 16}, 16),
    ({"max_num_batched_tokens": 64}, 8),
    ({"max_num_batched_tokens": 512}, 12),
]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_found_and_comes_first(name: str, planted_index: Callable[[str], Index]) -> None:
    findings = find_all(planted_index(name))
    assert findings[0].kind == PLANTED[name].kind
    assert PLANTED[name].culprit in findings[0].culprit
    assert findings[0].impact_ppm > 0
    assert all(finding.kind in (PLANTED[name].kind, "saturation") for finding in findings)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.soak] if (options, 14) in HEALTHY and rate < 14 else [])
        for seed, (options, rate) in enumerate(HEALTHY)
    ],
)
def test_nothing_is_found_in_a_healthy_run(seed: int, tmp_path: Path) -> None:
    options, rate = HEALTHY[seed]
    assert find_all(open_index(record_load(tmp_path, make_load(seed, rate=rate, num_requests=150), options))) == []


def test_the_cause_in_a_later_replicaset_is_found(tmp_path: Path) -> None:
    """With its own limits, plug-ins, requests and replicas; nothing is wrong with the first."""
    options = {"max_num_seqs": 2, "policy": "lrs", "replicas": 2, "max_queue_len": 30}
    options["router"] = {"type": "tests.look.planted:OneSidedRouter"}
    index = open_index(record_sets(tmp_path, **options), trust_local_plugins=True)
    findings = {each.kind: each for each in find_all(index)}
    assert all(each.title.startswith("b (mb): ") for each in findings.values())
    assert findings["saturation"].culprit == "max_num_seqs 2"
    assert findings["rejections"].culprit == "max_queue_len 30"
    assert findings["imbalance"].culprit == "router tests.look.planted:OneSidedRouter"
    assert "Sequences wait for replica 1 while replica 2 has nothing to do" in findings["imbalance"].title
    named = [index.requests.row(row) for each in findings.values() for row in _rows(index, each)]
    assert {row["replicaset"] for row in named} == {1}
    (unverified, _) = find_all(open_index(index.path, verify=False))
    assert (unverified.culprit, unverified.title[:9]) == ("load", "b (mb): M")


def test_its_findings_are_those_of_its_requests_alone(tmp_path: Path) -> None:
    both = find_all(open_index(record_sets(tmp_path / "both", max_num_seqs=2)))
    alone = find_all(open_index(record_load(tmp_path / "alone", make_load(2, rate=46), {"max_num_seqs": 2})))
    assert [each.title for each in both] == [f"b (mb): {each.title}" for each in alone]
    assert [(each.text, each.figures) for each in both] == [(each.text, each.figures) for each in alone]


def _rows(index: Index, finding: Finding) -> list[int]:
    return [row for request, sample in finding.requests if (row := index.find_row(request, sample)) is not None]


def test_of_a_run_that_is_not_verified_what_the_log_shows(planted_run: Callable[[str], Path]) -> None:
    kinds = [finding.kind for finding in find_all(open_index(planted_run("oscillating_eviction"), verify=False))]
    assert kinds[0] == "preemption_thrash"
    assert find_all(open_index(planted_run("one_sided_router"), verify=False)) == []
