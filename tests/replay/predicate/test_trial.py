from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventlm.errors import UsageError
from eventlm.replay.predicate.trial import Trial, holds_in, run_trial
from eventlm.replay.workload.file import encode_workload, save_workload
from tests.replay.made_workloads import COST
from tests.replay.shrink.planted import planted_workload

WORKLOAD = planted_workload(20)
SLOW = "max(ttft, prompt <= 256) > 400ms"


def _trial(condition: str = SLOW, **options: object) -> Trial:
    return Trial(workload=encode_workload(WORKLOAD).decode(), options=options, cost=COST, condition=condition)


def test_a_trial_says_whether_its_condition_holds() -> None:
    assert run_trial(_trial()).holds
    assert not run_trial(_trial("max(ttft) > 1min")).holds
    again = msgspec.json.decode(msgspec.json.encode(_trial()), type=Trial)
    assert run_trial(again) == run_trial(_trial())


def test_what_cannot_be_simulated_is_a_result() -> None:
    found = run_trial(_trial(num_blocks=1))
    assert not found.holds
    assert "at least 2" in found.error


def test_a_trial_tells_the_figures_if_asked() -> None:
    trial = msgspec.structs.replace(_trial("requests > 3"), with_figures=True)
    assert run_trial(trial).figures == {"requests": "20"}
    assert run_trial(_trial("requests > 3")).figures == {}


def test_a_test_file_asks_by_path(tmp_path: Path) -> None:
    save_workload(tmp_path / "w.jsonl", WORKLOAD)
    cost = msgspec.to_builtins(COST)
    assert holds_in(tmp_path / "w.jsonl", SLOW, options={}, cost_model=cost)
    assert not holds_in(tmp_path / "w.jsonl", "max(ttft) > 1min", options={}, cost_model=cost)
    with pytest.raises(UsageError, match="column 1"):
        holds_in(tmp_path / "w.jsonl", "slow", options={}, cost_model=cost)
