"""`eventlm trace stats`: tables, JSON, pictures."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eventlm.bus.log_reader import LogReader
from eventlm.cli.main import main
from eventlm.cli.trace.plots import MAX_POINTS, _cdf, _largest_of_intervals
from eventlm.events import Arrived, Emitted, Launched, StepCompleted
from eventlm.metrics.trace_metrics import REQUEST_METRICS, STEP_METRICS, trace_stats
from tests.bus.traces import header, lines
from tests.engine.test_step_ops import record
from tests.replay.golden import FOLDER

GOLDEN = FOLDER / "lrs_dying_workers.jsonl"
CDFS = ["ttft_cdf.png", "tbt_cdf.png", "e2e_cdf.png", "scheduling_delay_cdf.png"]
OVER_TIME = ["waiting.png", "running.png", "batch_size.png", "kv_usage.png"]


def stats(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["trace", "stats", *arguments]) == 0
    return capsys.readouterr().out


def test_the_tables_hold_every_metric_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    output = stats(capsys, str(GOLDEN))
    summary, requests, steps, classes, replicas = output.strip().split("\n\n")
    for table, metrics in ((requests, REQUEST_METRICS), (steps, STEP_METRICS)):
        columns, *rows = table.splitlines()
        assert columns.split()[1:] == ["count", "mean", "p50", "p90", "p95", "p99", "max"]
        assert [row.split()[0].rstrip(",") for row in rows] == list(metrics)
        assert {len(row) for row in rows} == {len(columns)}
    assert "prefill_e2e_time (TTFT), ms " in requests
    assert [row.split()[0] for row in replicas.splitlines()] == ["replicas", "0", "1"]
    columns, *rows = classes.splitlines()
    assert [row.split()[0] for row in rows] == ["gold", "silver"]
    assert {len(row) for row in rows} == {len(columns)}
    words = {row[:10].strip(): row[12:] for row in summary.splitlines()}
    assert words["run"].startswith("simulation, fake, 0.")
    assert words["sequences"].startswith("15 ended: ")
    assert words["requests"] == "10, 0 rejected"
    assert "operations" not in output


def test_what_is_counted_is_named_here_and_in_info(capsys: pytest.CaptureFixture[str]) -> None:
    with LogReader(GOLDEN) as log:
        events = [line.event() for line in log]
    output = stats(capsys, str(GOLDEN))
    past_prompt = sum(replica.prompt_tokens for replica in trace_stats(GOLDEN).snapshot.replicas)
    shown = sum(event.num_tokens for event in events if isinstance(event, Emitted))
    assert f"{past_prompt:,} prompt (of sequences past their prompt), {shown:,} output" in output
    columns, *replicas = output.strip().split("\n\n")[-1].splitlines()
    assert re.split(r"  +", columns)[1] == "steps completed"
    launches = {event.s for event in events if isinstance(event, Launched)}
    completed = sum(isinstance(event, StepCompleted) and event.c in launches for event in events)
    assert sum(int(row.split()[1]) for row in replicas) == completed < len(launches)
    assert main(["trace", "info", str(GOLDEN)]) == 0
    rows = {line[:10].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}
    arrived = sum(event.prompt_tokens for event in events if isinstance(event, Arrived))
    assert rows["tokens"] == f"{arrived:,} prompt (of all that arrived), {shown:,} output"
    assert rows["steps"].startswith(f"{len(launches):,} launched, ")


def test_operations_with_their_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = record(3, tmp_path)
    table = stats(capsys, str(path)).strip().split("\n\n")[-1].splitlines()
    assert table[0].split() == ["operations", "ms", "ms/step", "share"]
    assert [row.split()[0] for row in table[1:]] == ["attention", "mlp", "(the"]
    assert sum(float(row.split()[-1].rstrip("%")) for row in table[1:]) == pytest.approx(100, abs=0.2)
    assert all(row.endswith("%") for row in table[1:])


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(stats(capsys, "--json", str(GOLDEN)))
    assert found["distributions"].keys() == {*REQUEST_METRICS, *STEP_METRICS}
    assert found["distributions"]["prefill_e2e_time"]["count"] == 6
    assert found["metrics"]["num_requests"] == 10
    assert len(found["metrics"]["replicas"]) == 2
    assert list(found["metrics"]["classes"]) == ["gold", "silver"]
    assert found["classes"]["gold"]["prefill_e2e_time"]["count"] > 0


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "pictures"
    assert main(["trace", "stats", str(GOLDEN), "--plot", str(folder)]) == 0
    assert capsys.readouterr().err.splitlines() == [str(folder / name) for name in CDFS + OVER_TIME]
    assert {path.name for path in folder.iterdir()} == {*CDFS, *OVER_TIME}
    for path in folder.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_a_run_without_a_request_has_tables_and_pictures_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines([header()])))
    output = stats(capsys, str(path), "--plot", str(tmp_path / "pictures"))
    assert "0 ended\n" in output
    assert "replicas" in output
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {*OVER_TIME}


def test_pictures_that_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["trace", "stats", str(GOLDEN), "--plot", str(tmp_path / "file")]) == 2
    assert "eventlm: error: cannot write pictures to " in capsys.readouterr().err


def test_a_long_line_keeps_its_peaks() -> None:
    times = list(range(0, 10_000_000, 100))
    values = [7 if place == 54_321 else place % 3 for place in range(len(times))]
    found_times, found = _largest_of_intervals(times, values, times[-1])
    assert len(found) <= MAX_POINTS
    assert max(found) == 7
    assert found_times == sorted(found_times)
    assert _largest_of_intervals(times[:100], values[:100], times[99]) == (times[:100], values[:100])


def test_percentiles_that_lie_close_are_not_written_over_each_other() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _cdf(axes, Counter({3_000_000: 1, 223_000_000_000: 20, 226_000_000_000: 20}), "end-to-end time")
    figure.canvas.draw()
    median, tail = (text.get_window_extent() for text in axes.texts)
    assert not median.overlaps(tail)
