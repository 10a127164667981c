"""Simulations of workloads: their outcome, and the engine that is made for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.cli.trace.stats import render
from eventlm.config import CoreConfig
from eventlm.config.core import MAX_BLOCKS
from eventlm.config.load import load_config
from eventlm.config.objectives import Objectives
from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.events import Arrived, Event, Launched, Rejected, StepCompleted
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.branch.branch import branch
from eventlm.replay.branch.point import BranchPlace, find_point
from eventlm.replay.cost.files import load_cost_model
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.explain.explainer import explain
from eventlm.replay.rebuild import Changes
from eventlm.replay.simulate.engine import build_engine
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import what_if
from eventlm.replay.workload.workload import SequenceOutput, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams
from tests.replay.explained_logs import check_sums
from tests.replay.made_workloads import COST, MILLISECOND, PREDICTOR, make_engine, make_workload


def requests(*rows: tuple[int, int, int]) -> Workload:
    """Of (arrival in ms, prompt tokens, output tokens)."""
    return Workload(
        source="rows",
        requests=[
            WorkloadRequest(
                arrival=Arrived(prompt_tokens=prompt, max_tokens=output, scheduling=SchedulingParams(model="")),
                arrival_ns=at * MILLISECOND,
                outputs=[SequenceOutput()],
            )
            for at, prompt, output in rows
        ],
    )


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    result = simulate(requests((5, 100, 3)), make_engine(), COST, predictor=PREDICTOR)
    (sequence,) = result.outcome.sequences
    chunk_ns = (COST.base_ps + 100 * COST.prefill_ps + 100 * COST.context_ps) // 1000
    decodes_ns = [(COST.base_ps + COST.decode_ps + tokens * COST.context_ps) // 1000 for tokens in (101, 102)]
    assert sequence.ttft_ns == chunk_ns
    assert sequence.e2e_ns == chunk_ns + sum(decodes_ns)
    assert sequence.output_tokens == 3
    assert result.summary.num_steps == 3
    assert result.summary.latencies["ttft"].p50 == chunk_ns


def test_too_long_requests_are_rejected_and_counted() -> None:
    workload = requests((0, 100, 10), (1, 600, 10), (2, 100, 10))
    summary = simulate(workload, make_engine(), COST, predictor=PREDICTOR).summary
    assert summary.reject_reasons == {"context_length": 1}
    assert summary.num_rejected == 1
    assert summary.num_complete == 2


def test_a_full_queue_rejects() -> None:
    workload = requests(*[(0, 100, 10)] * 1, *[(1, 100, 10)] * 30)
    summary = simulate(workload, make_engine(max_queue_len=10), COST, predictor=PREDICTOR).summary
    assert summary.reject_reasons["queue_full"] >= 10
    assert summary.num_complete + summary.num_rejected == 31


def test_classes_hold_all_sequences_by_prompt_length() -> None:
    workload = requests((0, 200, 5), (1, 256, 5), (2, 257, 5), (3, 2000, 5))
    setup = make_engine(num_blocks=400, max_model_len=4000)
    summary = simulate(workload, setup, COST, predictor=PREDICTOR, objectives=Objectives(ttft=60, tpot=50)).summary
    assert [(found.label, found.num_sequences) for found in summary.classes] == [
        ("1 to 256", 2),
        ("257 to 1,024", 1),
        ("1,025 to 4,096", 1),
    ]
    assert summary.classes[0].objectives_met_ppm == 1_000_000
    assert summary.classes[2].objectives_met_ppm == 0
    assert summary.fluidity_ppm is not None


def test_arrivals_sped_up_wait_longer() -> None:
    workload = requests(*[(20 * index, 120, 20) for index in range(60)])
    calm, busy = (
        simulate(workload.sped_up(factor), make_engine(), COST, predictor=PREDICTOR).summary
        for factor in (500_000, 4_000_000)
    )
    assert busy.latencies["ttft"].p50 > calm.latencies["ttft"].p50
    assert busy.duration_ns < calm.duration_ns


def test_a_closed_loop_has_so_many_requests_under_way() -> None:
    live = most = 0

    def see(event: Event) -> None:
        nonlocal live, most
        live += isinstance(event, Arrived)
        most = max(most, live)
        live -= type(event).__name__ == "Finished" or isinstance(event, Rejected)

    workload = requests(*[(0, 50, 10)] * 20)
    summary = simulate(workload, make_engine(), COST, predictor=PREDICTOR, closed_loop=3, subscribers=[see]).summary
    assert most == 3
    assert summary.num_complete == 20


def test_without_the_prefix_cache_nothing_is_hit() -> None:
    workload = make_workload(4)
    hit = simulate(workload, make_engine(num_blocks=400), COST, predictor=PREDICTOR).summary
    missed = simulate(workload, make_engine(num_blocks=400, prefix_cache=False), COST, predictor=PREDICTOR).summary
    assert (hit.hit_ppm or 0) > 50_000
    assert not missed.hit_ppm


def test_replicas_share_the_load() -> None:
    launches: dict[int, int] = {}

    def see(event: Event) -> None:
        if isinstance(event, Launched):
            launches[event.replica] = launches.get(event.replica, 0) + 1

    workload = requests(*[(10 * index, 120, 20) for index in range(40)])
    options = {"replicas": 2, "router": "round_robin"}
    result = simulate(workload, make_engine(**options), COST, predictor=PREDICTOR, subscribers=[see])
    assert sorted(launches) == [0, 1]
    assert 0 < result.summary.busy_ppm <= 1_000_000


def test_blocks_and_context_come_from_the_machine_and_the_workload() -> None:
    config = load_config(None, {}, environment={})
    cost = load_cost_model("a100-llama3-8b")
    engine = build_engine(config, requests((0, 3000, 96)), cost)
    # 72 GB less 16 GB of weights, 2 MB a block.
    assert 25_000 < engine.setup.core.num_blocks < 28_000
    assert engine.setup.core.max_model_len == 3096
    assert "NVIDIA A100" in engine.notes[0]
    assert len(engine.predictor) == 5


def test_blocks_come_from_the_recorded_run_and_other_limits_are_reported() -> None:
    config = load_config(None, {"max_num_seqs": 8}, environment={})
    recorded = CoreConfig(models=["m"], num_blocks=123, max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=8192)
    engine = build_engine(config, requests((0, 300, 9)), COST, recorded=recorded)
    assert (engine.setup.core.num_blocks, engine.setup.core.max_num_batched_tokens) == (123, 8192)
    assert engine.notes == ["123 KV blocks, as recorded", "--max-num-seqs is 8; the run was recorded with 4"]


def test_no_engine_has_more_blocks_than_one_can_have() -> None:
    config = load_config(None, {"block_size": 1, "replicas": 2}, environment={})
    engine = build_engine(config, requests((0, 10**7, 9)), COST)
    assert engine.setup.core.num_blocks == MAX_BLOCKS // 2
    assert "as many as an engine can have" in engine.notes[0]
    recorded = CoreConfig(models=["m"], num_blocks=MAX_BLOCKS, max_model_len=1000)
    with pytest.raises(UsageError, match="16,777,216 KV blocks for each of 2 replicas are too many, 8,388,608 are"):
        build_engine(config, requests((0, 300, 9)), COST, recorded=recorded)


def test_a_step_of_the_usual_size_is_that_of_a_processor_and_takes_all_that_run() -> None:
    def budget(**options: int) -> int:
        config = load_config(None, options, environment={})
        return build_engine(config, requests((0, 300, 9)), COST).setup.core.max_num_batched_tokens

    assert (budget(), budget(max_num_seqs=1000), budget(max_num_batched_tokens=300)) == (512, 1000, 300)
    recorded = CoreConfig(models=["m"], num_blocks=123, max_model_len=1000, max_num_batched_tokens=64)
    config = load_config(None, {}, environment={})
    engine = build_engine(config, requests((0, 300, 9)), COST, recorded=recorded)
    assert engine.setup.core.max_num_batched_tokens == 256
    assert engine.notes[1] == "--max-num-batched-tokens is 256; the run was recorded with 64"


def test_blocks_without_a_machine_are_more_than_the_workload_can_fill() -> None:
    config = load_config(None, {"max_num_seqs": 4, "max_num_batched_tokens": 128}, environment={})
    workload = requests(*[(index, 300, 20) for index in range(30)])
    engine = build_engine(config, workload, COST)
    result = simulate(workload, engine.setup, COST, predictor=engine.predictor)
    assert result.summary.num_preemptions == 0
    assert result.summary.num_complete == 30
    assert "--num-blocks" in engine.notes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1}, "at least 2"),
        ({"num_blocks": 10, "max_model_len": 4000}, "hold 144"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "no room for a prompt"),
    ],
)
def test_engines_that_make_no_sense(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_engine(load_config(None, options, environment={}), requests((0, 10, 10)), COST)


def test_a_model_that_does_not_fit_its_machine() -> None:
    cost = load_cost_model("a100x4-llama3-70b")
    alone = structs.replace(cost, machine=structs.replace(cost.machine, num_gpus=1))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="leaves no room for KV blocks"):
        build_engine(load_config(None, {}, environment={}), requests((0, 10, 10)), alone)


def test_an_empty_workload() -> None:
    with pytest.raises(UsageError, match="no request"):
        build_engine(load_config(None, {}, environment={}), Workload(source="made", requests=[]), COST)


@pytest.mark.parametrize(("num_chunks", "num_stages"), [(1, 1), (12, 1), (1, 4), (4, 4), (60, 2), (60, 8)])
def test_equal_chunks_follow_each_other_through_the_stages(num_chunks: int, num_stages: int) -> None:
    setup = make_engine(num_blocks=600, max_model_len=9000, pipeline_parallel_size=num_stages)
    cost = LinearCost(base_ps=2_000_000_000, prefill_ps=20_000_000)
    result = simulate(requests((5, 128 * num_chunks, 1)), setup, cost, predictor=cost.coefficients())
    (sequence,) = result.outcome.sequences
    one_stage_ns = num_chunks * cost.step_ns(StepShape(128, 0, 128, 0, 1), 0, 0)
    wanted_ns = one_stage_ns / num_stages * (num_chunks + num_stages - 1) / num_chunks
    assert sequence.ttft_ns == pytest.approx(wanted_ns, rel=0.01)


def test_decodes_keep_all_stages_busy() -> None:
    """Twice as many sequences run at once, and all of them together take as long as half of them did."""
    workload = requests(*[(0, 16, 100)] * 16)
    cost = LinearCost(base_ps=2_000_000_000)
    busy: list[tuple[int, int]] = []

    def see(event: Event) -> None:
        if isinstance(event, StepCompleted) and len(event.stages) == 2:
            busy.extend(event.stages)

    options: dict[str, Any] = {"num_blocks": 400, "max_num_batched_tokens": 256}
    alone = simulate(workload, make_engine(**options), cost, predictor=cost.coefficients()).summary
    setup = make_engine(**options, pipeline_parallel_size=2)
    split = simulate(workload, setup, cost, predictor=cost.coefficients(), subscribers=[see]).summary
    assert split.duration_ns == pytest.approx(alone.duration_ns / 2, rel=0.03)
    assert sum(end - start for start, end in busy) == pytest.approx(2 * split.duration_ns, rel=0.05)


def test_the_header_says_how_the_replica_is_split() -> None:
    setup = make_engine(num_blocks=600, pipeline_parallel_size=2, tensor_parallel_size=4)
    cost = load_cost_model("a100-llama3-8b")
    header = simulate(requests((0, 100, 4)), setup, cost, predictor=PREDICTOR).header
    assert header.core.num_stages == 2
    assert header.config["parallel"]["tensor_parallel_size"] == 4
    with pytest.raises(UsageError, match="a linear cost model does not say what tensor ranks save"):
        simulate(requests((0, 100, 4)), setup, COST, predictor=PREDICTOR)


def test_a_simulated_pipeline_verifies_and_repeats(tmp_path: Path) -> None:
    setup = make_engine(pipeline_parallel_size=3, micro_batches=2, batcher="dynamic:target_ms=4")
    result = simulate(make_workload(7), setup, COST, predictor=PREDICTOR, record=tmp_path, validate_every=1)
    found = verify(result.run_folder)
    assert found.divergence is None
    assert found.num_decisions > 500
    # Repeated with its own durations it is the same, else this raises; a fit to its stages comes to the same times.
    baseline = what_if(result.run_folder, [Alternative()]).baseline.outcome
    recorded = result.outcome
    sums = [sum(each.e2e_ns or 0 for each in outcome.sequences) for outcome in (baseline, recorded)]
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
    # Each nanosecond of each sequence has one cause.
    explained = explain(result.run_folder, [(seq, None) for seq in result.workload_index])
    assert any(interval.cause == "step" for each in explained.explanations for interval in each.intervals)
    for explanation in explained.explanations:
        check_sums(explanation)
    stats = trace_stats(result.run_folder)
    (replica,) = stats.snapshot.replicas
    assert 0 < replica.busy_ns <= result.summary.duration_ns
    # A step is in a stage, or waits for the next, or is on its way.
    whole = sum(value * count for value, count in stats.values["batch_execution_time"].items())
    assert len(replica.stage_busy_ns) == 3
    parts = (replica.stage_busy_ns, replica.stage_wait_ns, replica.stage_exchange_ns)
    assert sum(map(sum, parts)) == whole
    assert replica.stage_wait_ns[0] == 0 < sum(replica.stage_wait_ns)
    assert any("0: stage 2" in line for line in render(stats))


def test_simulated_groups_verify_repeat_and_branch(tmp_path: Path) -> None:
    setup = make_engine(num_blocks=24, kv_parallel_size=2, kv_shard_tokens=64, pipeline_parallel_size=2)
    cost = structs.replace(COST, groups=2)
    result = simulate(make_workload(7), setup, cost, predictor=PREDICTOR, record=tmp_path, validate_every=1)
    found = verify(result.run_folder)
    assert found.divergence is None
    assert found.num_decisions > 500
    baseline = what_if(result.run_folder, [Alternative()]).baseline.outcome
    sums = [sum(each.e2e_ns or 0 for each in outcome.sequences) for outcome in (baseline, result.outcome)]
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
    for explanation in explain(result.run_folder, [(seq, None) for seq in result.workload_index]).explanations:
        check_sums(explanation)
    (replica,) = trace_stats(result.run_folder).snapshot.replicas
    with LogReader(result.run_folder) as log:
        loads = [event.loads for event in (line.event() for line in log) if isinstance(event, Launched)]
    assert replica.group_tokens == [sum(of_group) for of_group in zip(*loads, strict=True)]
    # The steps of a branch know where the sequences that are under way begin.
    middle = find_point(result.run_folder, BranchPlace(time_ns=result.summary.duration_ns // 2))
    rest = branch(result.run_folder, middle, num_draws=1).what_if
    sums = [sum(each.e2e_ns or 0 for each in outcome.sequences) for outcome in (rest.baseline.outcome, rest.recorded)]
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
    more = Changes(settings={"num_kv_groups": 3})
    with pytest.raises(UsageError, match="3 KV groups: a linear cost model of 2 does not say"):
        what_if(result.run_folder, [Alternative(changes=more)])
    costed = what_if(result.run_folder, [Alternative(changes=more)], cost_model=load_cost_model("a100-llama3-8b"))
    assert costed.alternatives[0].outcome.num_requests == len(result.workload_index)


def test_groups_share_the_reading_of_a_long_context() -> None:
    cost = load_cost_model("h200-llama3-8b")
    times: list[tuple[int, int]] = []
    for options in ({}, {"kv_parallel_size": 4, "kv_shard_tokens": 8192}):
        setup = make_engine(num_blocks=17_000, max_model_len=270_000, max_num_batched_tokens=8192, **options)
        (found,) = simulate(requests((0, 262_144, 20)), setup, cost, predictor=PREDICTOR).outcome.sequences
        times.append((found.tpot_ns or 0, found.ttft_ns or 0))
    (alone, alone_ttft), (shared, shared_ttft) = times
    # The weights are read by all, a quarter of the context by each.
    assert 0.25 * alone < shared < 0.6 * alone
    assert 0 < shared_ttft < alone_ttft
