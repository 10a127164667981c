"""Sweeps: cells in processes of their own, kept and not run again; one that fails stops no other."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm.config.load import load_config
from eventlm.errors import UsageError
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.sweep.cell import FinishedCell, code_hash
from eventlm.replay.sweep.slo import Capacity, Limit
from eventlm.replay.sweep.sweep import Sweep, SweepPlan, SweepResult, configuration_names, make_configurations
from eventlm.replay.workload.source import load_workload
from tests.replay.made_workloads import COST
from tests.replay.workload_files import write_made_workload

X = 1_000_000
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "num_blocks": 200}
FIXED, PULL = {"type": "fixed"}, {"type": "pull"}

CRASHING = """
import os
from eventlm.core.plugin import Policy

class Crashing(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        os._exit(7)
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    return write_made_workload(tmp_path / "W.jsonl")


def make_plan(workload: str, **changes: Any) -> SweepPlan:
    plan = SweepPlan(
        workload_path=workload,
        costs={"main": COST},
        configurations=make_configurations([{"type": "fcfs"}, {"type": "lrs"}], [FIXED], [PULL], [1]),
        loads_ppm=[X // 2, 4 * X],
        limits=[Limit("p99", "ttft", 40.0)],
        options=OPTIONS,
    )
    return structs.replace(plan, **changes)


def sweep(plan: SweepPlan, folder: Path, *, num_jobs: int = 2) -> SweepResult:
    return Sweep(plan, load_workload(plan.workload_path), folder, num_jobs=num_jobs).run()


def test_a_sweep_is_its_simulations_and_is_resumed(workload: str, tmp_path: Path) -> None:
    plan = make_plan(workload)
    result = sweep(plan, tmp_path / "out")
    assert (result.num_cells, result.num_run) == (4, 4)
    assert [each.name for each in result.configurations] == ["fcfs fixed", "lrs fixed"]
    fcfs = result.configurations[0]
    assert sorted(fcfs.summaries) == [X // 2, 4 * X]
    assert fcfs.capacity == Capacity(X // 2, 4 * X)

    loaded = load_workload(workload)
    config = load_config(None, OPTIONS, environment={})
    engine = build_engine(config, loaded.workload, COST)
    alone = simulate(loaded.workload.sped_up(4 * X), engine.setup, COST, predictor=engine.predictor)
    assert structs.replace(fcfs.summaries[4 * X], wall_ns=0) == structs.replace(alone.summary, wall_ns=0)

    again = sweep(plan, tmp_path / "out")
    assert (again.num_cells, again.num_run) == (4, 0)
    assert again.configurations == result.configurations

    # More loads cost only themselves, in another folder everything.
    assert sweep(structs.replace(plan, loads_ppm=[X // 2, X, 4 * X]), tmp_path / "out").num_run == 2


def test_what_decides_is_part_of_a_cell(workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(workload, configurations=make_configurations([{"type": "fcfs"}], [FIXED], [PULL], [1]))
    plan = structs.replace(plan, loads_ppm=[X])
    out = tmp_path / "out"
    assert sweep(plan, out).num_run == 1
    assert sweep(plan, out).num_run == 0
    (file,) = (out / "cells").glob("*.json")
    assert file.name.startswith("fcfs-fixed-pull-r1-x1-")

    # The same workload elsewhere is the same.
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(workload).read_bytes())
    assert sweep(structs.replace(plan, workload_path=str(copy)), out).num_run == 0

    # Other options, another cost model, another workload, other code are not.
    assert sweep(structs.replace(plan, options=OPTIONS | {"num_blocks": 150}), out).num_run == 1
    assert sweep(structs.replace(plan, costs={"main": structs.replace(COST, base_ps=1)}), out).num_run == 1
    other = write_made_workload(tmp_path / "other.jsonl", num_requests=20)
    assert sweep(structs.replace(plan, workload_path=other), out).num_run == 1
    monkeypatch.setattr("eventlm.replay.sweep.sweep.code_hash", lambda: "another version")
    assert sweep(plan, out).num_run == 1


def test_a_damaged_result_is_run_again(workload: str, tmp_path: Path) -> None:
    plan = make_plan(workload, loads_ppm=[X])
    sweep(plan, tmp_path)
    file = next((tmp_path / "cells").glob("fcfs*.json"))
    whole = file.read_bytes()
    # As any file that a program makes.
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    file.write_bytes(whole[:100])
    assert sweep(plan, tmp_path).num_run == 1
    finished = [msgspec.json.decode(content, type=FinishedCell) for content in (whole, file.read_bytes())]
    assert finished[0].spec == finished[1].spec
    assert not list((tmp_path / "cells").glob(".*"))


def test_a_cell_whose_process_dies_stops_no_other(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHING)
    monkeypatch.chdir(tmp_path)
    policies = [{"type": "crashing:Crashing"}, {"type": "fcfs"}]
    plan = make_plan(workload, configurations=make_configurations(policies, [FIXED], [PULL], [1]))
    result = sweep(plan, tmp_path / "out", num_jobs=1)
    crashing, fcfs = result.configurations
    assert crashing.summaries == {}
    assert set(crashing.errors) == {X // 2, 4 * X}
    assert "its process died (exit code 7)" in crashing.errors[X // 2]
    assert sorted(fcfs.summaries) == [X // 2, 4 * X]
    # It is tried again.
    assert sweep(plan, tmp_path / "out").num_run == 2


def test_a_workload_that_changes_under_way_is_an_error(workload: str, tmp_path: Path) -> None:
    plan = make_plan(workload, loads_ppm=[X])
    started = Sweep(plan, load_workload(workload), tmp_path / "out", num_jobs=1)
    write_made_workload(Path(workload), num_requests=3)
    result = started.run()
    assert all("has changed since the sweep began" in each.errors[X] for each in result.configurations)


def test_the_capacity_is_refined_for_each_configuration(workload: str, tmp_path: Path) -> None:
    plan = make_plan(workload, num_refinements=2)
    result = sweep(plan, tmp_path)
    for each in result.configurations:
        assert each.capacity is not None
        assert each.capacity.load_ppm is not None
        assert each.capacity.first_miss_ppm is not None
        assert len(each.summaries) == 4
        assert each.capacity.first_miss_ppm - each.capacity.load_ppm == 3_500_000 // 4
        loads = sorted(each.kept)
        index = loads.index(each.capacity.load_ppm)
        assert loads[index + 1] == each.capacity.first_miss_ppm


def test_configurations_are_named_by_what_they_differ_in() -> None:
    policies = [{"type": "fcfs"}, {"type": "edf", "multiplier": 2}, {"type": "fcfs"}]
    configurations = make_configurations(policies, [FIXED], [PULL], [1, 4])
    assert configuration_names(configurations) == [
        "fcfs fixed 1 replica",
        "fcfs fixed 4 replicas",
        "edf:multiplier=2 fixed 1 replica",
        "edf:multiplier=2 fixed 4 replicas",
    ]


@pytest.mark.parametrize(
    ("changes", "jobs", "message"),
    [
        ({}, 0, "--jobs 0"),
        ({"num_refinements": -1}, 1, "--refine -1"),
        ({"num_refinements": 1, "limits": []}, 1, "which needs --slo"),
        ({"options": {"num_blocks": 1}}, 1, "at least 2"),
        ({"configurations": make_configurations([{"type": "fcfs"}], [FIXED], [PULL], [0])}, 1, "replicas"),
        ({"configurations": make_configurations([{"type": "lrss"}], [FIXED], [PULL], [1])}, 1, "did you mean lrs"),
    ],
)
def test_sweeps_that_make_no_sense(
    workload: str, tmp_path: Path, changes: dict[str, Any], jobs: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Sweep(make_plan(workload, **changes), load_workload(workload), tmp_path / "out", num_jobs=jobs)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(workload: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        sweep(make_plan(workload), tmp_path / "file")


def test_the_code_is_known_by_its_sources() -> None:
    assert code_hash() == code_hash()
    assert len(code_hash().split("-")[-1]) == 16


def test_no_process_is_left(workload: str, tmp_path: Path) -> None:
    sweep(make_plan(workload, loads_ppm=[X]), tmp_path)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not [command for command in commands if b"sweep.worker" in command]
    assert not [thread for thread in threading.enumerate() if thread.name == "eventlm-pool"]
    for file in (tmp_path / "cells").iterdir():
        json.loads(file.read_bytes())
