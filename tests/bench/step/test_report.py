"""The figures of a measured case, and the tables that show them."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.bench.step.floor import BatchShape, ModelFigures, integer_matrices
from eventlm.bench.step.machine_probe import Machine
from eventlm.bench.step.measure import EXCHANGE, CaseResult, MeasuredStep, StepCase
from eventlm.bench.step.report import CaseTimes, case_times, middle_half, step_lines
from eventlm.models.config import read_model
from tests.checkpoints import make_checkpoint

MACHINE = Machine(bytes_per_second=1e9, flops_per_second=1e12)
SHAPE = BatchShape(num_sampled=8, rows=[(99, 1)] * 8)
OPS = {
    "qkv_proj": 4_000_000,
    "rotary": 0,
    "norm": 500_000,
    "embed": 500_000,
    "lm_head": 3_000_000,
    "sample": 1_000_000,
    "prepare": 400_000,
    "record": 100_000,
    "transport": 300_000,
    "engine": 200_000,
}


def measured(factor: float) -> MeasuredStep:
    ops = {op: int(time_ns * factor) for op, time_ns in OPS.items()}
    return MeasuredStep(sum(ops.values()), ops, SHAPE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFigures:
    weights = {"qkv_proj": 2_000_000, "o_proj": 0, "gate_up_proj": 0, "down_proj": 0, "lm_head": 1_000_000}
    config = read_model(make_checkpoint(tmp_path_factory.mktemp("model")))
    return ModelFigures(config=config, weight_bytes=weights, kv_token_bytes=1000)


@pytest.fixture
def times(model: ModelFigures) -> CaseTimes:
    result = CaseResult(StepCase(8, 100), [measured(1.0)] * 4 + [measured(9.0), measured(0.1)], 700_000.0)
    return case_times(result, MACHINE, model)


def test_the_middle_half_has_neither_the_quickest_nor_the_slowest() -> None:
    steps = [measured(factor) for factor in (5, 1, 4, 2, 3, 9, 8, 7)]
    assert [step.duration_ns // 10_000_000 for step in middle_half(steps)] == [3, 4, 5, 7]
    assert middle_half(steps[:1]) == steps[:1]


def test_the_times_of_a_case(times: CaseTimes) -> None:
    parts = {part.name: (part.ms, part.floor_ms) for part in times.parts}
    assert parts["qkv_proj"] == pytest.approx((4.0, 2.0))
    assert parts["lm_head"] == pytest.approx((3.0, 1.0))
    assert parts["attention"] == pytest.approx((0.0, 0.8))
    assert parts["norms and embed"] == (1.0, None)
    assert parts["preparation"] == (0.5, None)
    assert (parts["transport"][0], parts["engine"][0]) == (0.3, 0.2)
    assert times.ms == pytest.approx(10.0)
    # 2 MB, 1 MB, 800 x 1 KB of keys and values read and 8 x 1 KB written.
    assert times.floor_ms == pytest.approx(3.808)
    assert times.tokens_per_second == pytest.approx(800.0)
    assert times.engine_share == pytest.approx(0.2)
    assert (times.engine_cpu_ms, times.context_tokens, times.num_steps) == (0.7, 100.0, 6)


def test_the_tables(times: CaseTimes) -> None:
    lines = list(step_lines("some model", "cpu_avx2", MACHINE, [times]))
    assert lines[:2] == ["model    some model, cpu_avx2", "machine  reads 1.0 GB/s, multiplies 1.00 TFLOP/s"]
    cells = {line[:18].strip(): line[18:].split() for line in lines[4:] if line}
    assert cells["qkv_proj"] == ["4.00", "40.0%", "2.00", "2.00"]
    assert cells["norms and embed"] == ["1.00", "10.0%", "-", "-"]
    assert cells["step"] == ["10.00", "100.0%", "3.81", "2.63"]
    assert lines[-1].split()[-6:] == ["10.00", "800.0", "3.81", "2.63", "20.0%", "0.70"]
    assert len({len(line) for line in lines[4:17]}) == 1


def test_a_worker_that_has_no_operation_for_rotary_has_it_within_the_product_before(model: ModelFigures) -> None:
    step = measured(1.0)
    compiled = step._replace(ops={op: time_ns for op, time_ns in step.ops.items() if op != "rotary"})
    times = case_times(CaseResult(StepCase(8, 100), [compiled], 0.0), MACHINE, model)
    parts = {part.name: part.floor_ms for part in times.parts}
    assert "rotary and store" not in parts
    # 2 MB of weights, and 8 x 1 KB of keys and values.
    assert parts["qkv_proj"] == pytest.approx(2.008)
    assert times.floor_ms == pytest.approx(3.808)
    assert times.ms == pytest.approx(10.0)


def test_only_models_with_experts_have_rows_for_them(model: ModelFigures) -> None:
    rows = [part.name for part in case_times(CaseResult(StepCase(8, 100), [measured(1.0)], 0.0), MACHINE, model).parts]
    assert {"router", "experts"}.isdisjoint(rows)
    step = measured(1.0)._replace(ops={"router": 1_000_000, "experts": 3_000_000})
    parts = case_times(CaseResult(StepCase(8, 100), [step], 0.0), MACHINE, None).parts
    assert {part.name: part.ms for part in parts if part.ms} == {"router": 1.0, "experts": 3.0}


def test_only_a_part_of_a_model_waits_for_peers(model: ModelFigures) -> None:
    rows = [part.name for part in case_times(CaseResult(StepCase(8, 100), [measured(1.0)], 0.0), MACHINE, model).parts]
    assert {"waiting for peers", "sums of peers", "exchange"}.isdisjoint(rows)
    step = measured(1.0)._replace(ops={"meeting": 1_000_000, "add_parts": 3_000_000, EXCHANGE: 2_000_000})
    parts = case_times(CaseResult(StepCase(8, 100), [step], 0.0), MACHINE, None).parts
    expected = {"waiting for peers": 1.0, "sums of peers": 3.0, "exchange": 2.0}
    assert {part.name: part.ms for part in parts if part.ms} == expected


def test_int8_has_a_lower_floor(model: ModelFigures) -> None:
    slow = Machine(bytes_per_second=1e15, flops_per_second=1e6)
    result = CaseResult(StepCase(8, 100), [measured(1.0)], 0.0)
    floors = [
        {part.name: part.floor_ms for part in case_times(result, slow, each).parts if part.floor_ms}
        for each in (model, structs.replace(model, integers=integer_matrices(model.config, "int8", {})))
    ]
    assert {name: floors[0][name] / floors[1][name] for name in ("qkv_proj", "lm_head", "attention")} == pytest.approx(
        {"qkv_proj": 2, "lm_head": 2, "attention": 1}
    )


def test_without_a_model_there_is_no_floor() -> None:
    times = case_times(CaseResult(StepCase(8, 100), [measured(1.0)], 0.0), MACHINE, None)
    assert times.floor_ms is None
    assert {part.floor_ms for part in times.parts} == {None}
    assert next(step_lines("fake", "", MACHINE, [times])) == "model    fake"
