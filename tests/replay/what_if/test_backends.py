"""What-ifs of runs whose replicas are other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import BackendUp, Forwarded
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.outcome import OutcomeCollector, RunOutcome
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.what_if.report import render, render_json
from eventlm.replay.what_if.what_if import WhatIfResult, what_if
from eventlm.replay.workload.recorded_run import read_run
from tests.replay.backend_runs import record_backends
from tests.replay.backend_world import Traits, World, shared_prefixes
from tests.replay.what_if_runs import events_of, metric_of


def router(name: str) -> Alternative:
    """Another router."""
    return Alternative(changes=Changes(router={"type": name}))


def outcome_of(folder: Path) -> RunOutcome:
    collector = OutcomeCollector()
    with LogReader(folder) as log:
        log.fold(collector.see)
    return collector.outcome()


def p50(outcome: RunOutcome, name: str) -> float:
    found = outcome.latency(name)
    assert found is not None
    return found.p50


@pytest.mark.parametrize("seed", range(12))
def test_random_troubles_are_repeated(seed: int, tmp_path: Path) -> None:
    """With the times of its own answers, a run comes out as it was, byte for byte."""
    path = record_backends(tmp_path, seed)
    result = null_test(read_run(path), path)
    assert result.difference == ""
    assert result.num_decisions > 20


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_whatever_went_wrong_alternatives_come_to_an_end_and_verify(seed: int, tmp_path: Path) -> None:
    path = record_backends(tmp_path / "runs", seed)
    result = what_if(path, [router("round_robin"), Alternative(num_replicas=5)], output=tmp_path / "out")
    for each in result.alternatives:
        assert each.outcome.num_unfinished == 0
        assert verify(each.run_folder).exit_code == 0


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_the_better_router_is_predicted_as_it_then_is(seed: int, tmp_path: Path) -> None:
    """The servers compute in steps, and their caches are their own: nothing here is as the model has it."""
    work = shared_prefixes(seed, num_requests=150, per_second=30)
    before = World(tmp_path / "before", work, seed=seed, router="round_robin").run()
    result = what_if(before, [router("prefix_affinity")], output=tmp_path / "out")
    after = outcome_of(World(tmp_path / "after", work, seed=seed + 100, router="prefix_affinity").run())
    for name in ("ttft", "e2e"):
        metric = metric_of(result, f"{name}_p50")
        assert metric.recorded is not None
        assert metric.baseline == pytest.approx(metric.recorded, rel=0.1)
        predicted, really = metric.alternatives[0].value, p50(after, name)
        assert predicted == pytest.approx(really, rel=0.15)
        assert predicted is not None
        assert predicted < metric.recorded
        assert really < metric.recorded
    assert verify(result.alternatives[0].run_folder).exit_code == 0


def test_a_queue_in_the_gateway_is_as_long_as_it_was(tmp_path: Path) -> None:
    """The limit is the gateway's. A request that a server has waits there for a step at most, which it tells too."""
    work = shared_prefixes(1, num_requests=150, per_second=14)
    run = World(tmp_path, work, num_backends=2, probes=True, router="least_loaded", max_num_seqs=2).run()
    result = what_if(run, [])
    for name in ("ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99"):
        metric = metric_of(result, name)
        assert metric.recorded is not None
        assert metric.recorded > 1e9
        assert metric.baseline == pytest.approx(metric.recorded, rel=0.15)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with failures, whose servers tell their load and not their limits."""
    folder = tmp_path_factory.mktemp("troubled")
    work = shared_prefixes(7, num_requests=200, per_second=60)
    options = {"retry_backoff_ms": 5, "retry_budget_percent": 100}
    traits = Traits(fails=0.1, slots=6)
    return World(folder, work, traits=traits, probes=True, num_backends=2, router="least_loaded", **options).run()


@pytest.fixture(scope="module")
def asked(troubled: Path) -> WhatIfResult:
    return what_if(
        troubled,
        [
            Alternative(num_replicas=4),
            Alternative(num_replicas=1),
            Alternative(changes=Changes(settings={"max_attempts": 1})),
            Alternative(changes=Changes(settings={"max_num_seqs": 4})),
        ],
        output=troubled.parent / "out",
    )


def test_servers_can_be_more_or_fewer(asked: WhatIfResult) -> None:
    e2e = metric_of(asked, "e2e_p50")
    more, fewer = e2e.alternatives[0].value, e2e.alternatives[1].value
    assert more is not None
    assert e2e.baseline is not None
    assert fewer is not None
    assert more < 0.8 * e2e.baseline < e2e.baseline < fewer
    for each, count in zip(asked.alternatives, (4, 1, 2, 2), strict=True):
        events = events_of(each.run_folder)
        assert {fact.replica for fact in events if isinstance(fact, BackendUp)} == set(range(count))
        assert {event.replica for event in events if isinstance(event, Forwarded)} == set(range(count))
        assert verify(each.run_folder).exit_code == 0


def test_attempts_fail_as_often_as_they_did(asked: WhatIfResult) -> None:
    once = asked.alternatives[2].outcome
    assert asked.recorded.num_requests == 200
    assert sum(not each.is_complete for each in asked.recorded.sequences) <= 2
    assert 8 <= sum(each.reason == "error" for each in once.sequences) <= 35


def test_limits_are_kept(asked: WhatIfResult) -> None:
    running = [event.running for event in events_of(asked.alternatives[3].run_folder) if isinstance(event, Forwarded)]
    assert max(running) == 4


def test_slots_are_found_where_servers_tell_when_others_wait(asked: WhatIfResult) -> None:
    cost = asked.sets[0].cost
    assert isinstance(cost, BackendsCost)
    assert {each.slots for each in cost.backends} <= {5, 6}


def test_the_report_says_what_cannot_be_told(asked: WhatIfResult) -> None:
    text = " ".join(render(asked).split())
    assert "answers of 2 backends; held-out error of a first token" in text
    assert "up to 2 backends, each taken to cache " in text
    assert "the backends found" in text
    assert "other clients are taken to be as they were" in text
    assert "attempts unlike any recorded" in text
    assert '"cost_model":{"type":"backends"' in render_json(asked)


@pytest.mark.parametrize(
    ("cost", "message"),
    [(LinearCost(base_ps=1), "has backends: its cost model must be one of backends")],
)
def test_a_model_of_the_other_kind_is_refused(troubled: Path, cost: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        what_if(troubled, [router("pull")], cost_model=cost)


def test_a_given_model_is_taken(troubled: Path) -> None:
    cost = BackendsCost(backends=[BackendCost(first_ns=1_000_000, token_ps=1_000_000)])
    result = what_if(troubled, [router("pull")], cost_model=cost)
    assert result.sets[0].fit is None
    assert metric_of(result, "ttft_p50").baseline == 1_000_000
