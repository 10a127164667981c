"""`eventlm trace stats`: tables, JSON, pictures."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import num2date
from matplotlib.figure import Figure
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.cli.main import main
from eventlm.cli.trace.plots import (
    MAX_POINTS,
    _batch_line,
    _batch_lines,
    _cdf,
    _largest_of_intervals,
    _Line,
    _over_time,
)
from eventlm.cli.trace.stats import _ROW_NAMES
from eventlm.events import Arrived, Emitted, Finished, Forwarded, Launched, Rejected, StepCompleted
from eventlm.metrics.trace_metrics import REQUEST_METRICS, STEP_METRICS, Series, trace_stats
from tests.bus.traces import header, lines
from tests.engine.test_step_ops import record
from tests.replay.backend_runs import record_backends
from tests.replay.golden import FOLDER
from tests.replay.replicaset_runs import made_sets
from tests.replay.traces import tampered

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
        assert [row.split()[0].rstrip(",") for row in rows] == [_ROW_NAMES.get(name, name) for name in metrics]
        assert {len(row) for row in rows} == {len(columns)}
    assert [row.split()[0] for row in replicas.splitlines()] == ["replicas", "0", "1"]
    columns, *rows = classes.splitlines()
    assert [row.split()[0] for row in rows] == ["gold", "silver"]
    assert {len(row) for row in rows} == {len(columns)}
    words = {name: value.strip() for name, _, value in (row.partition("  ") for row in summary.splitlines())}
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
    values = [7 if index == 54_321 else index % 3 for index in range(len(times))]
    found = _largest_of_intervals(_Line(times, values), 0, times[-1])
    assert len(found.values) <= MAX_POINTS
    assert max(found.values) == 7
    assert found.times_ns == sorted(set(found.times_ns))
    short = _Line(times[:100], values[:100])
    assert _largest_of_intervals(short, 0, times[99]) == short


def test_a_long_line_drops_to_its_last_value_in_an_idle_time() -> None:
    """The largest value of an interval holds for that interval and not for the empty ones after it."""
    busy = [(ns, ns % 2 * 5) for ns in range(3 * MAX_POINTS)]
    hour = 3_600_000_000_000
    line = _Line(
        [ns for ns, _ in [*busy, (9_000, 0), (hour, 8)]], [value for _, value in [*busy, (9_000, 0), (hour, 8)]]
    )
    found = _largest_of_intervals(line, 0, hour)
    assert max(found.values) == 8
    assert sum(value > 0 for value in found.values) <= 2
    assert found.values[1] == 0


def test_a_batch_ends_with_its_step() -> None:
    series = Series(step_starts_ns=[10, 20, 900], step_ends_ns=[20, 35, 950], batch_sizes=[4, 2, 7])
    assert _batch_line(series, 0, 0) == _Line([0, 0, 10, 20, 35, 900, 950], [0, 0, 4, 2, 0, 7, 0])
    # A pause that is too short to be seen.
    assert _batch_line(series, 10, 865) == _Line([10, 10, 20, 900, 950], [0, 4, 2, 7, 0])
    overlapping = Series(step_starts_ns=[0, 15], step_ends_ns=[20, 30], batch_sizes=[1, 2])
    assert _batch_line(overlapping, 0, 0) == _Line([0, 0, 15, 30], [0, 1, 2, 0])


def axes_over_time(unix_start_ns: int, **arguments: bool) -> Axes:
    found = trace_stats(GOLDEN)
    found = structs.replace(found, header=structs.replace(found.header, unix_start_ns=str(unix_start_ns)))
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _over_time(axes, found, _batch_lines(found), "sequences", **{"in_clock_time": True} | arguments)
    figure.canvas.draw()
    return axes


def test_time_axes_show_the_time_of_day() -> None:
    start = datetime(2026, 11, 23, 14, 5, 10, tzinfo=UTC)
    axes = axes_over_time(int(start.timestamp()) * 10**9)
    assert "UTC" in axes.get_xlabel()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert all(re.fullmatch(r"14:05:10(\.\d*[1-9])?", label) for label in labels)
    assert len(set(labels)) == len(labels) >= 3
    first, last = num2date(axes.get_xlim())
    assert first == start
    assert (last - first).total_seconds() == pytest.approx(trace_stats(GOLDEN).snapshot.duration_ns / 1e9, abs=1e-5)


@pytest.mark.parametrize(("unix_start_ns", "in_clock_time"), [(0, True), (10**18, False)])
def test_a_run_without_a_clock_has_seconds(unix_start_ns: int, in_clock_time: bool) -> None:
    axes = axes_over_time(unix_start_ns, in_clock_time=in_clock_time)
    assert axes.get_xlabel().endswith(", s")
    assert axes.get_xlim()[0] == 0


def test_a_killed_run_has_its_first_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cut(objects: list[dict[str, object]]) -> None:
        num_first = next(index for index, each in enumerate(objects) if each["t"] == "finish")
        del objects[num_first:]

    path = tampered(GOLDEN, tmp_path / "t", cut)  # type: ignore[arg-type]
    found = json.loads(stats(capsys, str(path), "--json"))
    assert found["finish_reasons"] == {}
    assert 0 < found["num_unfinished_with_token"] <= found["num_unfinished"]
    assert found["distributions"]["prefill_e2e_time"]["count"] == found["num_unfinished_with_token"]
    assert "request_e2e_time" not in found["distributions"]
    assert f"0 ended; {found['num_unfinished']} unfinished, " in stats(capsys, str(path))


def test_percentiles_that_lie_close_are_not_written_over_each_other() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _cdf(axes, Counter({3_000_000: 1, 223_000_000_000: 20, 226_000_000_000: 20}), "end-to-end time")
    figure.canvas.draw()
    median, tail = (text.get_window_extent() for text in axes.texts)
    assert not median.overlaps(tail)


def test_each_of_several_replicasets_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_sets(tmp_path, num_requests=40)
    assert main(["trace", "stats", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "made, other" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("main ", "small "))}
    events = [line.event() for line in LogReader(run / "trace.jsonl")]
    set_of = {event.s: event.replicaset for event in events if isinstance(event, Arrived)}
    ended = Counter(set_of[event.request] for event in events if isinstance(event, Finished))
    rejected = Counter(set_of[event.request] for event in events if isinstance(event, Rejected))
    for number, (name, model, num_replicas) in enumerate((("main", "made", "1"), ("small", "other", "2"))):
        assert rows[name][1:5] == [model, num_replicas, str(ended[number]), str(rejected[number])]
    tokens = Counter[int]()
    for event in events:
        if isinstance(event, Emitted):
            tokens[min(event.replica, 1)] += event.num_tokens
    assert [rows[name][6] for name in ("main", "small")] == [f"{tokens[0]:,}", f"{tokens[1]:,}"]
    assert main(["trace", "stats", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    of_sets = [found["replicasets"][name]["prefill_e2e_time"]["count"] for name in ("main", "small")]
    assert sum(of_sets) == found["distributions"]["prefill_e2e_time"]["count"]
    assert min(of_sets) > 5


@pytest.mark.parametrize(("seed", "has_workers"), [(3, False), (1, True)])
def test_each_backend_has_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int, has_workers: bool
) -> None:
    run = record_backends(tmp_path, seed)
    tables = stats(capsys, str(run)).strip().split("\n\n")
    named = {table.split()[0]: table.splitlines()[1:] for table in tables}
    assert ("replicas" in named) == has_workers
    events = [line.event() for line in LogReader(run / "trace.jsonl")]
    attempts = Counter(event.replica for event in events if isinstance(event, Forwarded))
    shown = [int(row.split()[1].replace(",", "")) for row in named["backends"]]
    assert sorted(filter(None, shown)) == sorted(attempts.values())
