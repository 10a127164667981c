"""Stages and KV groups in a report, against the metrics of the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eventlm.look.report.ranks import StageTimes, group_rows, lanes, stage_rows
from eventlm.look.report.timeline import UNIT_NS, timeline_data
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.index.open import open_index
from eventlm.replay.index.window import windowed
from eventlm.replay.simulate.engine import in_ranks
from eventlm.replay.simulate.simulation import simulate
from eventlm.types import TimeWindow
from tests.look.report.runs import GOLDEN
from tests.look.report.unpacked import columns_of
from tests.replay.index.runs import record_ranks
from tests.replay.made_workloads import PREDICTOR, make_engine, make_workload


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas of three stages of two KV groups, on links that take their time."""
    options = {"pipeline_parallel_size": 3, "kv_parallel_size": 2, "kv_shard_tokens": 64, "replicas": 2}
    setup = make_engine(num_blocks=24, **options)
    cost = in_ranks(load_cost_model("a100-llama3-8b"), setup.config.parallel)
    folder = simulate(
        make_workload(7), setup, cost, predictor=PREDICTOR, record=tmp_path_factory.mktemp("runs")
    ).run_folder
    return Path(folder)


@pytest.mark.parametrize("kind", ["simulated", "dying"])
def test_sums_are_those_of_the_metrics(kind: str, simulated: Path, tmp_path: Path) -> None:
    path = simulated if kind == "simulated" else record_ranks(tmp_path)
    index, replicas = open_index(path), trace_stats(path).snapshot.replicas
    rows = stage_rows(index, StageTimes(index), 0)
    assert [(row["replica"], row["stage"]) for row in rows] == [(n, s) for n in range(len(replicas)) for s in range(3)]
    for row in rows:
        of = replicas[row["replica"]]
        assert row["busyNs"] == of.stage_busy_ns[row["stage"]]
        assert row["waitNs"] == of.stage_wait_ns[row["stage"]] // of.num_steps
        assert row["exchangeNs"] == of.stage_exchange_ns[row["stage"]] // of.num_steps
    assert any(row["waitNs"] for row in rows)
    assert any(row["exchangeNs"] for row in rows) == (kind == "simulated")
    groups = group_rows(index)
    assert [row["tokens"] for row in groups] == [count for of in replicas for count in of.group_tokens]
    # Steps that were lost with their worker count nowhere.
    assert (int(index.loads["tokens"].sum()) > sum(row["tokens"] for row in groups)) == (kind == "dying")
    for replica in range(len(replicas)):
        assert sum(row["sharePpm"] for row in groups if row["replica"] == replica) == pytest.approx(1_000_000, abs=3)


def test_lanes_have_each_step_once(simulated: Path) -> None:
    index = open_index(simulated)
    data = timeline_data(index, StageTimes(index), 0)
    names = ["stage 0", "stage 1", "stage 2", "group 0", "group 1"]
    assert data["laneNames"] == [f"{replica}: {name}" for replica in range(2) for name in names]
    found = columns_of(data["lanes"])
    is_stage = found["most"] == 0
    assert is_stage.sum() == len(index.stages) == 3 * (index.steps["done_s"] >= 0).sum()
    busy_ns = (found["end"] - found["start"])[is_stage].sum()
    all_ns = (index.stages["end_ns"] - index.stages["start_ns"]).sum()
    assert abs(busy_ns - all_ns) <= UNIT_NS * is_stage.sum()
    assert found["tokens"][~is_stage].sum() == index.loads["tokens"].sum()
    assert (found["tokens"] <= found["most"]).all()
    # A stage has one step at a time, and none before it has come.
    same = np.diff(found["lane"]) == 0
    assert (found["start"][1:] >= found["end"][:-1])[same & is_stage[1:]].all()
    assert (found["came"] <= found["start"]).all()


def test_a_window_has_the_lanes_of_its_steps(simulated: Path) -> None:
    whole = open_index(simulated)
    last_ns = whole.facts.last_ns
    part = windowed(whole, TimeWindow(last_ns // 3, last_ns // 2))
    names, columns = lanes(part, StageTimes(part), last_ns // 3, last_ns // 2 - last_ns // 3)
    assert len(names) == 10
    assert set(columns["step"].tolist()) == set(part.stages["step"].tolist())
    assert 0 < len(columns["step"]) < len(whole.stages)


def test_of_many_replicas_the_first_are_shown(tmp_path: Path) -> None:
    setup = make_engine(pipeline_parallel_size=4, replicas=8)
    cost = in_ranks(load_cost_model("a100-llama3-8b"), setup.config.parallel)
    index = open_index(simulate(make_workload(7), setup, cost, predictor=PREDICTOR, record=tmp_path).run_folder)
    names, _ = lanes(index, StageTimes(index), 0, index.facts.last_ns)
    assert len(names) == 24
    assert names[-1] == "5: stage 3"
    assert len(stage_rows(index, StageTimes(index), 0)) == 32


def test_one_process_has_none() -> None:
    index = open_index(GOLDEN)
    times = StageTimes(index)
    assert (stage_rows(index, times, 0), group_rows(index)) == ([], [])
    assert "lanes" not in timeline_data(index, times, 0)
