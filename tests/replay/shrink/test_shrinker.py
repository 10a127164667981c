from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec import structs

from eventlm.errors import UsageError
from eventlm.events import CacheFlushed, Paused, Resumed
from eventlm.replay.predicate.observation import pinned_options
from eventlm.replay.predicate.oracle import Budget, Oracle, Variant
from eventlm.replay.shrink.parts import keep_requests
from eventlm.replay.shrink.shrinker import ShrinkResult, shrink
from eventlm.replay.workload.workload import Workload
from tests.replay.made_workloads import COST, MILLISECOND, make_workload
from tests.replay.shrink.planted import planted_workload

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
SLOW = "max(ttft, prompt <= 256) > 400ms"


def _shrink(workload: Workload, condition: str, *, num_jobs: int = 1, **keywords: Any) -> ShrinkResult:
    budget = keywords.pop("budget", Budget())
    with Oracle(condition, COST, num_jobs=num_jobs, budget=budget) as oracle:
        return shrink(oracle, workload, pinned_options(workload, OPTIONS, COST), **keywords)


@pytest.fixture(scope="module")
def shrunk() -> ShrinkResult:
    return _shrink(planted_workload(200), SLOW, num_jobs=2)


def test_what_was_planted_is_found(shrunk: ShrinkResult) -> None:
    requests = shrunk.workload.requests
    assert len(requests) <= 10
    assert (shrunk.is_minimal, shrunk.stopped) == (True, "")
    assert sum(request.arrival.prompt_tokens > 256 for request in requests) >= 3
    assert all(request.arrival_ns == 0 and request.parent < 0 for request in requests)
    with Oracle(SLOW, COST, num_jobs=1) as oracle:
        assert oracle.holds(Variant(shrunk.workload, shrunk.options))
        # No one request can go.
        for index in range(len(requests)):
            rest = [each for each in range(len(requests)) if each != index]
            assert not oracle.holds(Variant(keep_requests(shrunk.workload, rest), shrunk.options))


def test_one_process_finds_the_same(shrunk: ShrinkResult) -> None:
    alone = _shrink(planted_workload(200), SLOW, num_jobs=1)
    assert structs.replace(alone, wall_ns=0) == structs.replace(shrunk, wall_ns=0)


def test_incidents_and_features_that_do_not_matter_go() -> None:
    workload = structs.replace(
        make_workload(1, num_requests=16),
        incidents=[
            CacheFlushed(ts=10 * MILLISECOND),
            Paused(ts=100 * MILLISECOND),
            CacheFlushed(ts=200 * MILLISECOND),
            Resumed(ts=5000 * MILLISECOND),
        ],
    )
    found = _shrink(workload, "max(ttft) > 3s", num_jobs=2).workload
    assert [type(fact) for fact in found.incidents] == [Paused, Resumed]
    [request] = found.requests
    assert request.arrival.blocks == []
    assert request.arrival.prompt_tokens == request.arrival.max_tokens == 1
    assert request.cancel is None


def test_the_limits_of_the_engine_shrink_too() -> None:
    result = _shrink(planted_workload(12, num_long=2, long_tokens=900), "preemptions >= 0", with_limits=True)
    assert len(result.workload.requests) == 1
    assert (result.options["num_blocks"], result.options["max_num_seqs"]) == (2, 1)
    assert result.options["max_num_batched_tokens"] == 1


def test_a_budget_ends_it_with_what_it_has() -> None:
    reports: list[str] = []
    budget = Budget(num_trials=12)
    result = _shrink(planted_workload(200), SLOW, budget=budget, on_pass=lambda report: reports.append(report.name))
    assert result.num_trials == 12
    assert not result.is_minimal
    assert "12 simulations" in result.stopped
    assert len(result.workload.requests) < 200
    assert reports == [each.name for each in result.passes]


def test_an_interrupt_ends_it_with_what_it_has() -> None:
    def interrupt(num_trials: int) -> None:
        if num_trials == 9:
            raise KeyboardInterrupt

    workload = planted_workload(200)
    with Oracle(SLOW, COST, num_jobs=2, on_trial=interrupt) as oracle:
        result = shrink(oracle, workload, pinned_options(workload, OPTIONS, COST))
    assert (result.stopped, result.is_minimal) == ("interrupted", False)
    assert len(result.workload.requests) < 200


def test_two_engines_that_differ_need_few_requests_to_do_so() -> None:
    workload = make_workload(1)
    found = _shrink(workload, "diverges(max_num_seqs=1, by=1ms)", num_jobs=2).workload
    # One that waits for another, or two samples of one request.
    assert sum(request.arrival.n for request in found.requests) == 2


@pytest.mark.soak
def test_a_large_workload_takes_no_minute() -> None:
    began = time.monotonic()
    result = _shrink(planted_workload(2000), SLOW, num_jobs=2)
    assert len(result.workload.requests) <= 10
    assert result.is_minimal
    assert time.monotonic() - began < 60
    alone = _shrink(planted_workload(2000), SLOW, num_jobs=1)
    assert structs.replace(alone, wall_ns=0) == structs.replace(result, wall_ns=0)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (
            "max(ttft) > 1min",
            r"does not hold for the whole workload, .* nothing to keep: max\(ttft\) is 0\.\d+ s",
        ),
        ("preemptions > 'x'", "cannot be compared"),
    ],
)
def test_it_must_hold_at_the_start(condition: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _shrink(planted_workload(12), condition)
