"""Routers do what they promise, on requests that share prefixes."""

from __future__ import annotations

import pytest

from benchmarks.simulated.routers import Outcome, Workload, measure
from eventlm.engine.plugins.registry import BUILT_IN

WORKLOAD = Workload(num_requests=120, rate=400, num_prefixes=12, prefix_tokens=512, tail_tokens=(32,), output_tokens=8)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {router: measure(router, WORKLOAD, num_replicas=3) for router in BUILT_IN["router"]}


def test_prefix_affinity_computes_each_prefix_about_once(outcomes: dict[str, Outcome]) -> None:
    once = WORKLOAD.num_prefixes * WORKLOAD.prefix_tokens + WORKLOAD.num_requests * WORKLOAD.tail_tokens[0]
    found = outcomes["prefix_affinity"].prefilled_tokens
    assert once <= found < 1.5 * once
    others = [outcome for router, outcome in outcomes.items() if router != "prefix_affinity"]
    assert all(found * 2 < other.prefilled_tokens for other in others)
    assert all(sum(outcomes["prefix_affinity"].ttft_ns) < sum(other.ttft_ns) for other in others)


def test_work_is_spread_over_the_replicas(outcomes: dict[str, Outcome]) -> None:
    # 1 would be perfect; with everything on one of three replicas it is 3.
    assert [router for router, outcome in outcomes.items() if outcome.imbalance > 1.5] == []


def test_with_one_queue_no_replica_idles_while_anything_waits(outcomes: dict[str, Outcome]) -> None:
    assert sum(outcomes["pull"].idle_ns) == 0


def test_least_loaded_makes_up_for_requests_of_different_length() -> None:
    # Every third request is long: in turn they would all meet the same replica.
    workload = WORKLOAD._replace(prefix_tokens=16, tail_tokens=(512, 8, 8))
    in_turn, by_load = (
        measure(router, workload, num_replicas=3, slack=9) for router in ("round_robin", "least_loaded")
    )
    assert by_load.imbalance < 1.2 < 1.4 < in_turn.imbalance


def test_the_same_arrivals_give_the_same_figures(outcomes: dict[str, Outcome]) -> None:
    assert measure("prefix_affinity", WORKLOAD, num_replicas=3) == outcomes["prefix_affinity"]
