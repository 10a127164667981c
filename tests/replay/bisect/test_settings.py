from __future__ import annotations

from typing import Any

import pytest

from eventlm.errors import UsageError
from eventlm.replay.bisect.settings import DecidingSettings, find_settings
from eventlm.replay.predicate.observation import observe
from eventlm.replay.predicate.oracle import UNLIMITED, Budget, BudgetSpentError, Oracle
from eventlm.replay.workload.workload import Workload
from tests.replay.made_workloads import COST, make_workload

FIRST: dict[str, Any] = {
    "policy": {"type": "fcfs"},
    "batcher": {"type": "fixed"},
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_blocks": 400,
    "max_skips": 8,
}
SECOND = FIRST | {"policy": {"type": "lrs"}, "num_blocks": 48, "max_skips": 2, "max_steps_in_flight": 1}


def _find(
    condition: str,
    first: dict[str, Any],
    second: dict[str, Any],
    *,
    budget: Budget = UNLIMITED,
    workload: Workload | None = None,
) -> DecidingSettings:
    with Oracle(condition, COST, num_jobs=2, budget=budget) as oracle:
        return find_settings(oracle, workload or make_workload(1), first, second)


def test_the_settings_that_decide_are_named() -> None:
    found = _find("preemptions > 0", FIRST, SECOND)
    assert [each.name for each in found.differing] == ["policy", "num_blocks", "max_skips", "max_steps_in_flight"]
    names = [each.name for each in found.deciding]
    assert "num_blocks" in names
    assert len(names) < len(found.differing)
    assert not found.holds_in_first
    blocks = next(each for each in found.deciding if each.name == "num_blocks")
    assert (blocks.where_not, blocks.where_holds) == (400, 48)


def test_it_may_hold_in_the_first() -> None:
    found = _find("preemptions > 0", SECOND, FIRST)
    assert found.holds_in_first
    blocks = next(each for each in found.deciding if each.name == "num_blocks")
    assert (blocks.where_not, blocks.where_holds) == (400, 48)
    # A setting that one run has not is its default there.
    assert [each.where_not for each in found.differing if each.name == "max_steps_in_flight"] == [None]


@pytest.mark.parametrize(
    ("condition", "second", "words"),
    [
        ("requests > 0", SECOND, "of both runs"),
        ("requests < 0", SECOND, "of neither runs?"),
        ("requests > 0", FIRST, "the same settings"),
        ("requests > 0", FIRST | {"num_blocks": 1}, "settings of the second run: .*at least 2"),
    ],
)
def test_where_there_is_nothing_to_find(condition: str, second: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _find(condition, FIRST, second)


def test_a_context_that_fewer_blocks_do_not_hold_is_no_cause() -> None:
    """With fewer blocks alone it is cut, as an engine does."""
    first = FIRST | {"max_model_len": 399 * 16}
    second = FIRST | {"num_blocks": 48, "max_model_len": 47 * 16}
    found = _find("preemptions > 0", first, second)
    assert [each.name for each in found.differing] == ["num_blocks", "max_model_len"]
    assert [(each.name, each.error) for each in found.deciding] == [("num_blocks", "")]


def test_a_setting_without_which_nothing_can_be_simulated_is_no_cause() -> None:
    first = FIRST | {"max_num_batched_tokens": 8}
    second = FIRST | {"max_num_batched_tokens": 256, "max_num_seqs": 100}
    crowd = make_workload(1).sped_up(1_000_000_000)
    outcome = observe(crowd, second, COST).outcome
    assert outcome is not None
    found = _find(f"steps == {outcome.num_steps}", first, second, workload=crowd)
    seqs, tokens = found.deciding
    assert (seqs.name, tokens.name) == ("max_num_seqs", "max_num_batched_tokens")
    assert seqs.error == ""
    assert "--max-num-batched-tokens 8 is less than --max-num-seqs 100" in tokens.error


def test_a_budget_ends_it_with_what_it_has() -> None:
    found = _find("preemptions > 0", FIRST, SECOND, budget=Budget(num_trials=3))
    assert found.stopped == "the budget of 3 simulations is spent"
    assert "num_blocks" in [each.name for each in found.deciding]
    with pytest.raises(BudgetSpentError, match="of 1 simulation is spent before both settings were simulated"):
        _find("preemptions > 0", FIRST, SECOND, budget=Budget(num_trials=1))
