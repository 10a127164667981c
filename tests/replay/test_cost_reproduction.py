"""A run whose costs are known is recorded; a model fitted to the record makes nearly the same run of the same work."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from msgspec import structs

from eventlm.replay.cost.fit import fit_cost
from eventlm.replay.cost.model import CostModel, LinearCost, Overheads
from eventlm.replay.outcome import RunOutcome
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.workload.recorded_run import read_run
from tests.replay.made_workloads import COST, PREDICTOR, make_engine, make_workload

#: 2 ms a step, and what a linear predictor does not have: a dearer first chunk, and ways between the processes.
STEADY = structs.replace(
    COST,
    first_chunk_ps=1_500_000_000,
    chunk_context_ps=30_000,
    overheads=Overheads(dispatch_ns=200_000, between_ns=50_000, report_ns=300_000),
)
NOISY = structs.replace(STEADY, ratios_ppm=[800_000, 900_000, 900_000, 1_000_000, 1_400_000])
#: Every second quarter of a second the machine is half as fast.
UNEVEN = structs.replace(NOISY, slowness_ppm=[1_000_000, 2_000_000] * 40, slowness_window_ns=250_000_000)


def run(cost: CostModel, record: Path | None = None, *, policy: str = "fcfs", seed: int = 4) -> RunOutcome:
    workload = make_workload(seed, num_requests=100)
    engine = make_engine(num_blocks=400, policy=policy)
    return simulate(workload, engine, cost, predictor=PREDICTOR, record=record).outcome


def quantiles(outcome: RunOutcome) -> dict[str, float]:
    found = {}
    for name in ("ttft", "e2e"):
        distribution = outcome.latency(name)
        assert distribution is not None
        found |= {f"{name} p50": distribution.p50, f"{name} p99": distribution.p99}
    return found


@pytest.mark.parametrize(
    ("cost", "policy", "tolerance"),
    [(STEADY, "fcfs", 0.02), (STEADY, "edf", 0.02), (NOISY, "fcfs", 0.1), (UNEVEN, "edf", 0.1)],
    ids=["steady", "steady-edf", "noisy", "uneven-edf"],
)
def test_latencies_come_out_again(cost: LinearCost, policy: str, tolerance: float, tmp_path: Path) -> None:
    """In the median of some runs: a single p99 is that of a few requests, and what befell those is not fitted."""
    errors: dict[str, list[float]] = {}
    for seed in range(5 if cost.ratios_ppm else 1):
        true_cost = structs.replace(cost, seed=seed)
        recorded = quantiles(run(true_cost, tmp_path, policy=policy, seed=seed))
        fitted = fit_cost(read_run(tmp_path / "latest").steps)
        repeated = quantiles(run(fitted.model, policy=policy, seed=seed))
        for name, value in repeated.items():
            errors.setdefault(name, []).append(abs(value / recorded[name] - 1))
        assert fitted.model.overheads.between_ns == pytest.approx(50_000, abs=1000)
        assert fitted.model.overheads.report_ns == pytest.approx(300_000, abs=1000)
    assert max(median(found) for found in errors.values()) < tolerance


def test_slow_stretches_are_where_they_were(tmp_path: Path) -> None:
    """Without the time axis the slow quarters are gone, and with them what they did to those who waited then."""
    recorded = quantiles(run(UNEVEN, tmp_path))
    steps = read_run(tmp_path / "latest").steps
    following = fit_cost(steps)
    elsewhere = fit_cost(steps, follows_run=False)
    assert following.report.mean_near < 0.7 * following.report.mean
    errors = [
        abs(quantiles(run(model))["ttft p50"] / recorded["ttft p50"] - 1)
        for model in (following.model, elsewhere.model.without_noise())
    ]
    assert errors[0] < errors[1]
