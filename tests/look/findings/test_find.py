"""Findings name the cause of runs that were made bad in one way, and nothing in healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.look.findings.find import find_all
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.planted import PLANTED, make_load, record_load

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


def test_of_a_run_that_is_not_verified_what_the_log_shows(planted_run: Callable[[str], Path]) -> None:
    kinds = [finding.kind for finding in find_all(open_index(planted_run("oscillating_eviction"), verify=False))]
    assert kinds[0] == "preemption_thrash"
    assert find_all(open_index(planted_run("one_sided_router"), verify=False)) == []
