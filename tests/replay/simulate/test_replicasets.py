"""Simulated engines with several replicasets: from a configuration, and from a run that had several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.config.load import load_config
from eventlm.errors import UsageError
from eventlm.events import WorkerLost, WorkerUp
from eventlm.replay.cost.model import CostModel
from eventlm.replay.export.workload import export_workload
from eventlm.replay.simulate.replicasets import PlacedEngine, build_replicasets, recorded_defaults
from eventlm.replay.simulate.simulation import SimulationResult, simulate
from eventlm.replay.verify.verifier import verify
from eventlm.replay.workload.file import read_workload, save_workload
from eventlm.replay.workload.source import LoadedWorkload, load_workload
from tests.replay.made_workloads import COST
from tests.replay.replicaset_runs import SLOW, made_sets
from tests.replay.what_if_runs import requests_of

COSTS: dict[str, CostModel] = {"main": COST, "small": SLOW, "big": COST}


def run(placed: PlacedEngine, **options: Any) -> SimulationResult:
    engine, cost, workload = placed
    return simulate(workload, engine.setup, cost, predictor=engine.predictor, others=engine.others, **options)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> LoadedWorkload:
    return load_workload(made_sets(tmp_path_factory.mktemp("runs")))


def test_a_run_of_several_replicasets_is_simulated_with_them(recorded: LoadedWorkload, tmp_path: Path) -> None:
    config = load_config(
        None,
        {"max_num_seqs": 8, "max_num_batched_tokens": 128, "replicasets": {"small": {"replicas": 3, "policy": "lrs"}}},
        defaults=recorded_defaults(recorded.workload),
        environment={},
    )
    placed = build_replicasets(config, recorded, COSTS)
    assert "small: 64 KV blocks, as recorded" in placed.engine.notes
    assert "small: --replicas is 3; the run was recorded with 2" in placed.engine.notes
    found = run(placed, record=tmp_path, validate_every=50)
    first, second = found.header.sets
    assert (first.name, first.core.models, second.name, second.core.models) == ("main", ["made"], "small", ["other"])
    assert (first.core.num_replicas, second.core.num_replicas) == (1, 3)
    # A block of the run has 8 tokens there, and here 16.
    assert {second.core.block_size, first.core.block_size} == {16}
    assert verify(found.run_folder).exit_code == 0
    of_first, of_second = found.summary.replicasets
    assert of_first.num_complete + of_second.num_complete == found.summary.num_complete
    assert min(of_first.num_complete, of_second.num_complete) > 10
    assert 0 < of_second.busy_ppm < of_first.busy_ppm
    # The whole has tokens after the ends of texts too.
    rates = of_first.output_tokens_per_second + of_second.output_tokens_per_second
    assert rates == pytest.approx(found.summary.output_tokens_per_second, rel=0.02)
    both = sum(each.latencies["ttft"].count for each in (of_first, of_second))
    assert both == found.summary.latencies["ttft"].count


def test_it_comes_back_from_a_workload_file(recorded: LoadedWorkload, tmp_path: Path) -> None:
    save_workload(tmp_path / "W.jsonl", recorded.workload)
    again = read_workload(tmp_path / "W.jsonl")
    assert again.recorded == recorded.workload.recorded
    assert [each.block_size for each in again.requests] == [each.block_size for each in recorded.workload.requests]
    assert {each.block_size for each in again.requests} == {0, 8}
    config = load_config(None, {}, defaults=recorded_defaults(again), environment={})
    times = []
    for loaded in (recorded, LoadedWorkload(again)):
        outcome = run(build_replicasets(config, loaded, COSTS)).outcome
        times.append([(each.request, each.index, each.ended_ns) for each in outcome.sequences])
    assert times[0] == times[1]


def test_what_befell_its_replicas_befalls_those_of_the_same_set(tmp_path: Path) -> None:
    """Where the first set has more replicas than it had, under other numbers."""
    export_workload(made_sets(tmp_path), tmp_path / "W.jsonl")
    workload = read_workload(tmp_path / "W.jsonl")
    lost = WorkerLost(ts=5_000_000, replica=1, epoch=1)
    workload = structs.replace(workload, incidents=[*workload.incidents, lost])
    options = {"replicas": 3, "replicasets": {"small": {"replicas": 1}}}
    config = load_config(None, options, defaults=recorded_defaults(workload), environment={})
    placed = build_replicasets(config, LoadedWorkload(workload), COSTS)
    incidents = [(type(fact), getattr(fact, "replica", -1)) for fact in placed.workload.incidents]
    assert incidents == [(WorkerUp, 0), (WorkerUp, 3), (WorkerLost, 3)]
    # Nobody serves the second model after that.
    assert run(placed).summary.replicasets[1].num_complete == 0


def test_replicasets_of_a_configuration_serve_a_workload_without_models() -> None:
    loaded = LoadedWorkload(requests_of([0, 10, 20]))
    options = {"replicasets": {"big": {"model": "big"}, "small": {"model": "small", "num_blocks": 30}}}
    placed = build_replicasets(load_config(None, options, environment={}), loaded, COSTS)
    found = run(placed)
    assert [each.core.models for each in found.header.sets] == [["big"], ["small"]]
    assert [each.num_complete for each in found.summary.replicasets] == [3, 0]
    assert found.header.sets[1].core.num_blocks == 30


@pytest.mark.parametrize("model", ["second", "/models/second", "./second", "org/second", "b"])
def test_a_request_may_name_a_model_by_its_folder_or_its_set(model: str) -> None:
    [request, other] = requests_of([0, 10]).requests
    scheduling = structs.replace(request.arrival.scheduling, model="second" if model != "b" else "b")
    request = structs.replace(request, arrival=structs.replace(request.arrival, scheduling=scheduling))
    options = {"replicasets": {"a": {"model": "first"}, "b": {"model": model}}}
    loaded = LoadedWorkload(structs.replace(requests_of([0]), requests=[request, other]))
    placed = build_replicasets(load_config(None, options, environment={}), loaded, {"a": COST, "b": SLOW})
    assert [each.arrival.replicaset for each in placed.workload.requests] == [1, 0]


def test_one_replicaset_has_no_table_and_no_names(recorded: LoadedWorkload) -> None:
    placed = build_replicasets(load_config(None, {}, environment={}), LoadedWorkload(requests_of([0])), COSTS)
    found = run(placed)
    assert found.summary.replicasets == []
    assert not found.header.replicasets
    assert "cost_model" in found.header.host["simulated"]
    assert recorded_defaults(placed.workload) == {}


def test_mistakes_say_which_replicaset(recorded: LoadedWorkload) -> None:
    def build(**options: Any) -> None:
        config = load_config(
            None, {"replicasets": options}, defaults=recorded_defaults(recorded.workload), environment={}
        )
        build_replicasets(config, recorded, COSTS)

    with pytest.raises(UsageError, match="replicaset small: --num-blocks 1: at least 2 are needed"):
        build(small={"num_blocks": 1})
    with pytest.raises(UsageError, match="the replicasets main and big both serve 'made'"):
        build(big={"model": "x", "served_model_name": "made"})
    with pytest.raises(UsageError, match="up to 1,024"):
        build(small={"replicas": 1024})
