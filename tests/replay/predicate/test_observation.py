from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.core.state.core_state import CoreState
from eventlm.errors import InvariantError
from eventlm.events import WorkerLost
from eventlm.replay.predicate.observation import changed_options, observe, pinned_options
from tests.replay.made_workloads import COST, make_workload
from tests.replay.shrink.planted import planted_workload

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128}


def test_a_run_is_observed() -> None:
    workload = make_workload(1)
    found = observe(workload, OPTIONS | {"num_blocks": 64}, COST)
    assert found.outcome is not None
    assert found.outcome.num_requests == len(found.workload_index)
    assert sorted(found.workload_index.values()) == list(range(len(workload.requests)))
    assert (found.broken, found.num_plugin_failures) == ("", 0)


def test_a_healthy_core_passes_its_checks() -> None:
    workload = structs.replace(make_workload(2, num_requests=12), incidents=[WorkerLost(ts=10**8, replica=0, epoch=1)])
    checked = observe(workload, OPTIONS | {"num_blocks": 64}, COST, validates=True)
    assert checked.broken == ""
    assert checked.outcome == observe(workload, OPTIONS | {"num_blocks": 64}, COST).outcome


def test_a_broken_rule_is_an_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(state: CoreState) -> None:
        if state.next_seq > 40:
            raise InvariantError("a rule is broken")

    monkeypatch.setattr("eventlm.replay.simulate.simulation.validate", break_down)
    assert observe(make_workload(2), OPTIONS, COST).broken == ""
    found = observe(make_workload(2), OPTIONS, COST, validates=True)
    assert (found.outcome, found.broken) == (None, "a rule is broken")


def test_a_part_of_the_workload_meets_the_same_engine() -> None:
    workload = planted_workload(40)
    options = pinned_options(workload, OPTIONS, COST)
    part = structs.replace(workload, requests=workload.requests[:3])
    assert pinned_options(part, OPTIONS, COST) != options
    assert pinned_options(part, options, COST) == options
    assert {"num_blocks", "max_model_len", "max_num_batched_tokens", "predictor"} <= options.keys()


def test_fewer_blocks_hold_a_shorter_context() -> None:
    options = {"num_blocks": 100, "max_model_len": 1000, "block_size": 16}
    assert changed_options(options, {"num_blocks": 11}) == {**options, "num_blocks": 11, "max_model_len": 160}
    assert changed_options(options, {"num_blocks": 200}) == {**options, "num_blocks": 200}
    assert changed_options(options, {"block_size": 8})["max_model_len"] == 792
    # What is asked for is not cut: that it does not fit is an error.
    assert changed_options(options, {"num_blocks": 11, "max_model_len": 900})["max_model_len"] == 900
