"""Simulations of replicas that are other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from eventlm.config.load import load_config
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost, FailureRate
from eventlm.replay.simulate.backend_sets import backends_setup, for_backends
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import SimulationResult, simulate
from eventlm.replay.verify.verifier import verify
from eventlm.replay.workload.workload import Workload
from tests.replay.backend_world import shared_prefixes
from tests.replay.made_workloads import make_workload

MILLISECOND = 1_000_000
COST = BackendCost(kind="vllm", first_ns=5 * MILLISECOND, prefill_ps=60_000_000, token_ps=9_000_000_000, slots=8)


def simulated(workload: Workload, *costs: BackendCost, record: Path | None = None, **options: Any) -> SimulationResult:
    """A simulation on such servers; two, if nothing else is said."""
    config = load_config(None, {"replicas": 2} | options, environment={})
    cost = BackendsCost(backends=[*costs] or [COST])
    engine = build_engine(config, workload, cost)
    return simulate(workload, engine.setup, cost, predictor=engine.predictor, validate_every=50, record=record)


def test_a_made_workload_comes_to_its_end_and_verifies(tmp_path: Path) -> None:
    found = simulated(make_workload(3), record=tmp_path, policy="edf", router="prefix_affinity")
    assert verify(found.run_folder).exit_code == 0
    assert found.outcome.num_unfinished == 0
    assert not found.outcome.num_steps
    assert {each.reason for each in found.outcome.sequences} <= {"length", "eos", "stop", "cancelled", "complete"}


def test_a_router_that_knows_the_caches_wins() -> None:
    work = shared_prefixes(1, num_requests=150, per_second=30)
    medians = {}
    for router in ("round_robin", "prefix_affinity"):
        found = simulated(work, router=router, replicas=4, num_blocks=200)
        medians[router] = found.summary.latencies["ttft"].p50
    assert medians["prefix_affinity"] < 0.8 * medians["round_robin"]


def test_more_servers_are_faster() -> None:
    work = shared_prefixes(2, num_requests=150, per_second=80)
    two, four = (simulated(work, replicas=n).summary.latencies["e2e"].mean for n in (2, 4))
    assert four < 0.8 * two


def test_retries_are_as_the_options_say() -> None:
    work = shared_prefixes(4, num_requests=200, per_second=30)
    failing = BackendCost(
        first_ns=5 * MILLISECOND, token_ps=20_000_000_000, failures=[FailureRate(kind="server", rate_ppm=200_000)]
    )
    none = simulated(work, failing, forward_retries=0)
    some = simulated(work, failing, forward_retries=3, retry_budget_percent=100)
    assert 20 <= none.summary.num_cut_short <= 60
    assert some.summary.num_cut_short <= 3


def test_the_setup_is_that_of_a_server() -> None:
    config = load_config(None, {"replicas": 3, "hedge_ms": 20, "backend_cache_tokens": 1600}, environment={})
    servers = BackendsCost(backends=[COST, BackendCost(name="b:1", slots=32)])
    core = backends_setup(config, shared_prefixes(1), servers, model_name="m", recorded=None).core
    assert core.forwards is not UNSET
    assert (core.num_replicas, core.num_blocks, core.forwards.hedge_ns) == (3, 101, 20 * MILLISECOND)


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_the_servers_own(seed: int) -> None:
    workload = make_workload(seed)
    assert for_backends(workload, [False]) is workload
    changed = for_backends(workload, [True])
    assert not any(each.arrival.scheduling.has_text_ends for each in changed.requests)
    assert all(output.num_tokens == output.worker_end for each in changed.requests for output in each.outputs)
    assert for_backends(changed, [True]) == changed
