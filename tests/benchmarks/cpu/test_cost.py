"""The benchmark of a step's cost: it finds cliffs and nothing else, and measures the steps that it says."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.cpu import cost
from benchmarks.cpu.cost import MAX_LENGTH, Bench, all_series, num_blocks, run_series
from benchmarks.cpu.cost_report import Cost, Point, Series, cliffs, render
from eventlm.bench.step.machine_probe import Machine
from tests.kernels.cpu.decoders import Shape, write_checkpoint

MACHINE = Machine(bytes_per_second=1e10, flops_per_second=1e12)


def costs(indices: Sequence[int], times_ms: Sequence[float], floors_ms: Sequence[float] = ()) -> list[Cost]:
    """Of steps of so many rows."""
    floors_ms = floors_ms or [1.0] * len(indices)
    return [
        Cost(Point(x, x, 1, 0), int(time * 1e6), floor * 1e6)
        for x, time, floor in zip(indices, times_ms, floors_ms, strict=True)
    ]


@pytest.mark.parametrize(
    ("places", "times_ms", "found"),
    [
        ([1, 2, 4, 8, 16], [10, 10.5, 11.5, 13.5, 17.5], []),
        # Dearer than a step twice as large.
        ([1, 2, 4, 8, 16], [10, 10.5, 18, 13.5, 17.5], [2]),
        # Dearer from there on.
        ([16, 32, 33, 64, 128], [10, 12, 20, 24, 48], [2]),
        # The last one.
        ([64, 128], [10, 24], [1]),
    ],
)
def test_a_cliff_is_dearer_than_its_neighbours(places: list[int], times_ms: list[float], found: list[int]) -> None:
    assert [cliff.point_index for cliff in cliffs(costs(places, times_ms), 0.1, grows=True)] == found


def test_what_must_cost_more_is_no_cliff() -> None:
    assert cliffs(costs([512, 1024], [100, 240], [50, 115]), 0.1, grows=True) == []
    # The same tokens behind more context.
    assert cliffs(costs([1, 2, 3], [10, 20 * 2, 30 * 3]), 0.1, grows=False) == []


def test_all_points_fit_the_worker() -> None:
    for series in all_series():
        indices = [point.x for point in series.points]
        assert indices == sorted(set(indices))
        for point in series.points:
            assert point.context + point.num_tokens <= MAX_LENGTH
            assert not series.grows or point.num_all_tokens == point.x


def test_steps_are_measured(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Shape(), max_positions=MAX_LENGTH)
    options = argparse.Namespace(
        dtype="bfloat16", quantization="none", kv_cache_dtype="auto", threads=1, cpu_kernels="auto"
    )
    bench = Bench(folder, options, num_blocks=100)
    points = [Point(1, 1, 1, 33), Point(3, 3, 1, 33), Point(40, 1, 40, 16)]
    assert [num_blocks(point) for point in points] == [3, 9, 4]
    series = Series("batch", "some", points, grows=True)
    measured = run_series(bench, series, lambda: MACHINE, rounds=2)
    found = measured.costs
    assert [cost.point for cost in found] == points
    # Most of a step's bytes are the weights: two layers and the last product.
    weight_bytes = 2 * (2 * (64 * 128 + 64 * 64 + 3 * 64 * 160) + 64 * 384)
    kv_bytes = 34 * 2 * 2 * 2 * 16 * 2
    floor_ns = (weight_bytes + kv_bytes) / MACHINE.bytes_per_second * 1e9
    assert found[0].floor_ns == pytest.approx(floor_ns, rel=0.05)
    assert all(cost.least_ns > cost.floor_ns / 10 for cost in found)
    title, _, *rows = render(measured, [])
    assert title == "batch, some; the machine reads 10.0 GB/s, multiplies 1.00 TFLOP/s"
    assert len(rows) == 3


def test_only_lines_with_points_are_measured_and_each_says_what_the_machine_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, Shape(), max_positions=MAX_LENGTH)
    machines = [Machine(bytes_per_second=1e10 + probe, flops_per_second=1e12 - probe) for probe in range(3)]
    some = [Point(x, x, 1, 33) for x in (1, 2)]
    series = [Series("batch", "few", some, grows=True), Series("context", "huge", [Point(1, 10**6, 1, 1)], grows=False)]
    monkeypatch.setattr(cost, "all_series", lambda: series)
    monkeypatch.setattr(cost, "measure", lambda _: machines.pop(0))
    flags = ["--threads", "1", "--rounds", "1", "--kv-gib", "0.001"]
    files = ["--output", str(tmp_path / "cost.png"), "--json", str(tmp_path / "cost.json")]
    monkeypatch.setattr(sys, "argv", ["cost.py", "--model", str(folder), *flags, *files])
    assert cost.main() == 0
    # The better of before and behind.
    assert len(machines) == 1
    written = json.loads((tmp_path / "cost.json").read_text())
    best = {"bytes_per_second": 1e10 + 1, "flops_per_second": 1e12}
    assert written["machines"] == [{"plot": "batch", "series": "few"} | best]
    assert [(point["series"], point["x"], point["context"]) for point in written["points"]] == [
        ("few", 1, 33),
        ("few", 2, 33),
    ]
    output = capsys.readouterr().out
    assert "batch, few; the machine reads 10.0 GB/s" in output
    assert "huge" not in output


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_steps_with_8_bits_have_lower_floors_and_finite_numbers(
    tmp_path: Path, kernels: str, kv_cache_dtype: str
) -> None:
    folder = write_checkpoint(tmp_path, Shape(), max_positions=MAX_LENGTH)
    options = argparse.Namespace(
        dtype="bfloat16", quantization="none", kv_cache_dtype="auto", threads=1, cpu_kernels=kernels
    )
    in_floats = Bench(folder, options, num_blocks=100)
    options.quantization, options.kv_cache_dtype = "int8", kv_cache_dtype
    bench = Bench(folder, options, num_blocks=100)
    # The same two layers and last product, a byte each; keys and values with their scales.
    assert sum(bench.forward.weight_bytes.values()) == pytest.approx(
        2 * (64 * 128 + 64 * 64 + 3 * 64 * 160) + 64 * 384, rel=0.1
    )
    assert bench.kv_token_bytes == bench.forward.cache.token_bytes == 2 * 2 * 2 * (16 + 4)
    # Where only the products count, those with weights have half the floor, and few are not.
    multiplies = Machine(bytes_per_second=1e15, flops_per_second=1e6)
    point = Point(2, 2, 1, 1)
    assert bench.floor_ns(point, multiplies) == pytest.approx(in_floats.floor_ns(point, multiplies) / 2, rel=0.02)
    hidden_TH = bench.forward.run(bench.rows(Point(2, 2, 1, 100)), None)
    assert bench.forward.logits(hidden_TH).isfinite().all()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--cpu-kernels", "sse"], "invalid choice: 'sse'"),
        (["--rounds", "0"], "--rounds is 1 at least"),
        (["--threads", "-1"], "--threads 0 at least"),
        (["--output", "nowhere/cost.png"], "nowhere/cost.png: its folder does not exist"),
        (["--json", "nowhere/cost.json"], "nowhere/cost.json: its folder does not exist"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    monkeypatch.setattr(cost, "run", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(cost, "save_random_qwen", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["cost.py", *flags])
    with pytest.raises(SystemExit) as ended:
        cost.main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_too_little_memory_for_any_point_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path, Shape(), max_positions=MAX_LENGTH)
    monkeypatch.setattr(cost, "measure", lambda _: MACHINE)
    monkeypatch.setattr(sys, "argv", ["cost.py", "--model", str(folder), "--kv-gib", "0", "--threads", "1"])
    assert cost.main() == 1
    assert "--kv-gib 0 does not hold the keys and values of a single point" in capsys.readouterr().err
