from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.replay.bisect.threshold import Threshold, find_threshold, setting_named
from eventlm.replay.predicate.observation import observe, pinned_options
from eventlm.replay.predicate.oracle import UNLIMITED, Budget, Oracle, Variant
from tests.replay.made_workloads import COST, make_workload

WORKLOAD = make_workload(1)
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 64}


def _find(condition: str, name: str, low: int, high: int, budget: Budget = UNLIMITED) -> Threshold:
    start = Variant(WORKLOAD, pinned_options(WORKLOAD, OPTIONS, COST))
    with Oracle(condition, COST, num_jobs=2, budget=budget) as oracle:
        return find_threshold(oracle, start, name, low, high)


def test_a_threshold_is_found_exactly() -> None:
    found = _find("preemptions > 0", "num_blocks", 45, 200)
    assert found.below is not None
    assert found.above == found.below + 1
    assert found.is_monotone
    assert not found.holds_above
    start = Variant(WORKLOAD, pinned_options(WORKLOAD, OPTIONS, COST))
    with Oracle("preemptions > 0", COST, num_jobs=1) as oracle:
        assert oracle.holds(start.with_option("num_blocks", found.below)) != oracle.holds(
            start.with_option("num_blocks", found.above)
        )


def test_a_load_is_a_setting_too() -> None:
    found = _find("max(ttft) > 300ms", "load", 200_000, 8_000_000)
    assert found.holds_above
    assert found.below is not None
    assert 200_000 <= found.below < 8_000_000


def test_what_changes_more_than_once_is_said() -> None:
    figures = {}
    for seqs in range(1, 10):
        outcome = observe(WORKLOAD, OPTIONS | {"max_num_seqs": seqs}, COST).outcome
        assert outcome is not None
        figures[seqs] = outcome.num_steps
    found = _find(f"steps == {figures[2]} or steps == {figures[5]}", "max_num_seqs", 1, 9)
    assert not found.is_monotone
    assert (found.below, found.above, found.holds_above) == (1, 2, True)


def test_what_changes_nowhere_is_said() -> None:
    found = _find("requests > 0", "max_num_seqs", 1, 5)
    assert (found.below, found.above, found.is_monotone) == (None, None, True)
    assert [sample.value for sample in found.samples] == [1, 2, 3, 4, 5]


def test_where_the_engine_refuses_values_nothing_changes() -> None:
    found = _find("requests > 0", "max_num_seqs", 120, 136)
    assert (found.below, found.above, found.stopped) == (None, None, "")
    assert [sample.value for sample in found.samples if not sample.error] == [120, 122, 124, 126, 128]
    beyond = found.samples[5]
    assert (beyond.value, "--max-num-batched-tokens 128 is less" in beyond.error) == (129, True)
    found = _find("requests > 0", "num_blocks", 1, 3)
    assert [(sample.value, sample.holds) for sample in found.samples] == [(1, False), (2, True), (3, True)]
    assert "at least 2" in found.samples[0].error
    assert found.below is None
    with pytest.raises(UsageError, match="no value can be simulated"):
        _find("requests > 0", "num_blocks", -5, -1)


def test_a_change_between_a_sample_and_the_limit_is_found() -> None:
    """The samples are 1, 401 and so on; 2 is the first that can be simulated."""
    found = _find("preemptions > 0 or rejected > 0", "num_blocks", 1, 3201)
    assert [sample.value for sample in found.samples[:3]] == [1, 2, 401]
    assert found.below is not None
    assert found.above == found.below + 1
    assert not found.holds_above


def test_a_budget_ends_it_with_what_it_has() -> None:
    found = _find("preemptions > 0", "num_blocks", 45, 200, Budget(num_trials=11))
    assert found.stopped == "the budget of 11 simulations is spent"
    assert len(found.samples) == 9
    assert found.below is not None
    assert found.above is not None
    assert found.above > found.below + 1
    found = _find("preemptions > 0", "num_blocks", 45, 200, Budget(num_trials=1))
    assert [sample.value for sample in found.samples] == [45]
    assert (found.below, found.stopped) == (None, "the budget of 1 simulation is spent")


def test_mistakes() -> None:
    assert setting_named("blocks") == "num_blocks"
    assert setting_named("tokens") == "max_num_batched_tokens"
    assert setting_named("max_skips") == "max_skips"
    for name in ("policy", "blcks", "port", "budget"):
        with pytest.raises(UsageError, match=f"--over {name}"):
            setting_named(name)
    with pytest.raises(UsageError, match="must be below"):
        _find("requests > 0", "num_blocks", 5, 5)
