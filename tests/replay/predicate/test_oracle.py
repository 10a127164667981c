from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.errors import UsageError
from eventlm.replay.predicate.oracle import Budget, BudgetSpentError, Oracle, Variant
from eventlm.replay.workload.workload import Workload
from tests.replay.made_workloads import COST
from tests.replay.shrink.planted import planted_workload

WORKLOAD = planted_workload(12)
HANGING = """
from eventlm.core.plugin import Policy

class Hanging(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        while True:
            pass
"""


def _variant(num_requests: int) -> Variant:
    return Variant(structs.replace(WORKLOAD, requests=WORKLOAD.requests[:num_requests]), {})


def _oracle(condition: str, num_jobs: int = 1, **keywords: Any) -> Oracle:
    return Oracle(condition, COST, num_jobs=num_jobs, **keywords)


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_the_first_counts_however_many_processes_there_are(num_jobs: int) -> None:
    numbers: list[int] = []
    with _oracle("requests >= 4", num_jobs, on_trial=numbers.append) as oracle:
        variants = [_variant(size) for size in (2, 3, 5, 4, 6)]
        assert oracle.first(variants) == 2
        assert oracle.num_trials == 3
        # Known already, whether it was counted or tried beside another.
        assert oracle.holds(_variant(5))
        assert oracle.num_trials == 3
        assert oracle.holds(_variant(4))
        assert oracle.num_trials == 4
        assert oracle.first(variants[:2]) is None
        assert [result.holds for result in oracle.results(variants)] == [False, False, True, True, True]
    assert numbers == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_a_budget_of_trials_ends_at_the_same_place(num_jobs: int) -> None:
    with _oracle("requests >= 4", num_jobs, budget=Budget(num_trials=2)) as oracle:
        with pytest.raises(BudgetSpentError, match="2 simulations"):
            oracle.first([_variant(size) for size in (1, 2, 3, 4)])
        assert oracle.num_trials == 2
        assert not oracle.holds(_variant(2))


def test_a_budget_of_time_ends() -> None:
    with _oracle("requests >= 4", budget=Budget(seconds=0)) as oracle, pytest.raises(BudgetSpentError, match="0 s"):
        oracle.holds(_variant(2))


def test_a_budget_of_time_ends_a_simulation_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    variant = Variant(WORKLOAD, {"policy": {"type": "hanging:Hanging"}})
    began = time.monotonic()
    with _oracle("requests >= 4", 2, budget=Budget(seconds=1.5)) as oracle:
        with pytest.raises(BudgetSpentError, match=r"the budget of 1\.5 s is spent"):
            oracle.results([variant, variant._replace(options={**variant.options, "max_skips": 2})])
        assert oracle.num_trials == 0
    assert time.monotonic() - began < 8


def test_the_figures_of_a_condition() -> None:
    with _oracle("requests >= 4") as oracle:
        assert oracle.figures(_variant(2)) == {"requests": "2"}
        assert oracle.figures(Variant(WORKLOAD, {"num_blocks": 1})) == {}
        assert oracle.num_trials == 0


def test_errors() -> None:
    with _oracle("requests >= 1") as oracle:
        result = oracle.result(Variant(Workload(source="", requests=[]), {}))
        assert (result.holds, "no request" in result.error) == (False, True)
    with pytest.raises(UsageError, match="column 1"):
        _oracle("request > 1")
    with pytest.raises(UsageError, match="--jobs 0"):
        _oracle("requests > 1", 0)


def test_fewer_blocks_hold_a_shorter_context() -> None:
    variant = Variant(WORKLOAD, {"num_blocks": 100, "max_model_len": 1000, "block_size": 16})
    assert variant.with_option("num_blocks", 11).options == {
        "num_blocks": 11,
        "max_model_len": 160,
        "block_size": 16,
    }
    assert variant.with_option("max_num_seqs", 2).options["max_model_len"] == 1000
