"""The engine of a branch: what may change at a point, what the state there contradicts, and what its header says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Header, PolicySwapped
from eventlm.replay.branch.engine import branch_header, build_branch_engine, facts_after, left_out_swaps
from eventlm.replay.branch.point import BranchPlace, BranchPoint, find_point
from eventlm.replay.rebuild import Changes
from eventlm.replay.workload.recorded_run import read_run
from tests.replay.branch_runs import drain_ends
from tests.replay.golden import FOLDER
from tests.replay.made_workloads import COST
from tests.replay.traces import record, small_machine
from tests.replay.what_if_runs import made_run
from tests.workload import Chaos

GOLDEN = FOLDER / "edf_tight.jsonl"


@pytest.fixture(scope="module")
def point() -> BranchPoint:
    """Where sequences run and wait, and steps are in flight."""
    for s in drain_ends(GOLDEN):
        found = find_point(GOLDEN, BranchPlace(event=s))
        replica = found.state.replicas[0]
        if (
            len(replica.steps) > 1
            and sum(bool(row.block_table) for r in found.state.requests for row in r.sequences) > 2
        ):
            return found
    raise AssertionError("no such point")


@pytest.fixture(scope="module")
def header() -> Header:
    with LogReader(GOLDEN) as log:
        return log.header


def test_a_policy_that_was_installed_takes_over_under_its_name(header: Header, point: BranchPoint) -> None:
    found = build_branch_engine(header, point, Changes(policy={"type": "lrs"}))
    assert found.policies == ["lrs"]
    names = [record.name for record in found.engine.sets[0].plugins if record.kind == "policy"]
    assert sorted(names) == sorted(record.name for record in header.plugins if record.kind == "policy")
    assert found.new_core(point).state.policy_name == "edf"


def test_parameters_of_an_installed_policy_can_change(header: Header, point: BranchPoint) -> None:
    found = build_branch_engine(header, point, Changes(policy={"type": "edf", "multiplier": 9}))
    record = next(each for each in found.engine.sets[0].plugins if each.name == "edf")
    assert record.parameters["multiplier"] == 9
    assert found.engine.rebuilt.sets[0].plugins.policies["edf"] == found.new_core(point).state.replicasets[0].policy


def test_a_policy_that_was_not_installed_is_added(tmp_path: Path) -> None:
    path = made_run(tmp_path, 3, num_requests=10) / "trace.jsonl"
    with LogReader(path) as log:
        header = log.header
    assert [record.name for record in header.plugins if record.kind == "policy"] == ["fcfs"]
    found = build_branch_engine(header, find_point(path, BranchPlace(event=20)), Changes(policy={"type": "lpm"}))
    assert [record.name for record in found.engine.sets[0].plugins if record.kind == "policy"] == ["fcfs", "lpm"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 40}, "--set num_blocks: the cache at event"),
        ({"state_slots": 40}, "--set state_slots: the cache at event"),
        ({"block_size": 8}, "--set block_size: the trace's facts depend on"),
        ({"num_replicas": 2}, "--set num_replicas: the trace's facts depend on"),
        ({"max_num_seqs": 1}, "max_num_seqs=1 contradicts the state after event .* more than max_num_seqs"),
        ({"max_steps_in_flight": 1}, "max_steps_in_flight=1 contradicts the state .* steps in flight"),
        ({"max_tokens_per_row": 2}, "max_tokens_per_row"),
        ({"no_such_field": 2}, "no_such_field"),
    ],
)
def test_what_cannot_change_there_is_refused(
    header: Header, point: BranchPoint, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as found:
        build_branch_engine(header, point, Changes(settings=settings))
    assert "\n" not in str(found.value)


def test_the_header_says_where_the_branch_comes_from(point: BranchPoint) -> None:
    run = read_run(GOLDEN)
    found = build_branch_engine(run.header, point, Changes(batcher={"type": "dynamic"}, settings={"max_num_seqs": 7}))
    header = branch_header(run, point, found, [COST])
    origin = header.host["simulated"]
    assert (origin["run"], origin["event"]) == (run.header.run, point.s)
    assert origin["changes"] == "dynamic, max_num_seqs=7"
    assert origin["policy"] == "edf"
    other = build_branch_engine(run.header, point, Changes(policy={"type": "fcfs"}))
    assert branch_header(run, point, other, [COST]).host["simulated"]["policy"] == "fcfs"
    assert origin["cost_model"]["type"] == "linear"
    assert header.previous_h == point.h
    assert header.core.max_num_seqs == 7
    assert next(each.name for each in header.plugins if each.kind == "batcher") == "dynamic"
    assert header.run.startswith(f"{run.header.run}-branch-{point.s}-dynamic")


def test_later_swaps_are_left_out_where_the_branch_has_a_policy(tmp_path: Path) -> None:
    for seed in range(40):
        path = record(tmp_path, small_machine({"type": "fcfs"}), seed=seed, chaos=Chaos(kills=1), run=f"{seed}")
        run = read_run(path)
        if any(isinstance(fact, PolicySwapped) for fact in run.external_facts):
            break
    start = find_point(path, BranchPlace(event=drain_ends(path)[0]))
    as_it_was, other = (
        build_branch_engine(run.header, start, Changes(policy=policy)) for policy in (None, {"type": "lrs"})
    )
    kept, replaced = facts_after(run, start, as_it_was), facts_after(run, start, other)
    swaps = [fact.name for fact in kept if isinstance(fact, PolicySwapped)]
    assert swaps
    assert all(fact.s > start.s and fact.c == 0 for fact in kept)
    assert [fact.name for fact in replaced if isinstance(fact, PolicySwapped)] == ["lrs"]
    assert len(replaced) == len(kept) - len(swaps) + 1
    [note] = left_out_swaps(run, start, other)
    assert swaps[0] in note
    assert left_out_swaps(run, start, as_it_was) == []
