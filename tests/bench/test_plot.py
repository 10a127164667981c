"""The picture: it shows the numbers that the report has."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eventlm.bench.plot import plot_load
from eventlm.bench.serve_bench import ServeResult
from eventlm.bench.statistics import summarize
from eventlm.config.objectives import Objectives
from tests.bench.records import record, result
from tests.bench.test_report import serve_result


def figure_of(found: ServeResult, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure, not drawn: `test_report` has it drawn."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **settings: figures.append(figure))
    plot_load(Path("plot.png"), found, summarize(found.load))
    return figures[0]


def test_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = serve_result(objectives=Objectives(ttft=150))
    ttft, tpot, e2e, over_time = figure_of(found, monkeypatch).axes
    assert [list(values) for values in ttft.lines[0].get_data()] == [[100.0, 100.0, 200.0], [0.0, 0.5, 1.0]]
    assert [list(values) for values in tpot.lines[0].get_data()] == [[50.0, 50.0, 100.0], [0.0, 0.5, 1.0]]
    assert [list(values) for values in e2e.lines[0].get_data()] == [[200.0, 200.0, 400.0], [0.0, 0.5, 1.0]]
    assert "objective 150 ms" in ttft.texts[0].get_text()
    assert "p90 190 ms" in ttft.texts[0].get_text()
    times, running = over_time.lines[0].get_data()
    assert max(running) == 2
    assert times[-1] == 0.5
    assert list(over_time.lines[1].get_data()[0]) == [0.21]


def test_without_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = result(record(0, intended=0, tokens=[], end=1, error="timeout"))
    axes = figure_of(serve_result(failed), monkeypatch).axes
    assert [each.texts[0].get_text() for each in axes[:3]] == ["no successful request"] * 3


def test_long_latencies_are_in_seconds_and_wide_ones_on_a_log_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = result(record(0, intended=0, tokens=[10, 20]), record(1, intended=0, tokens=[20_000, 30_000]))
    ttft, *_ = figure_of(serve_result(wide), monkeypatch).axes
    assert (ttft.get_xlabel(), ttft.get_xscale()) == ("s", "log")
    assert list(ttft.lines[0].get_data()[0]) == [0.01, 0.01, 20.0]


@pytest.mark.parametrize(("objective_ms", "side"), [(10, "left"), (10_000, "right")])
def test_the_numbers_do_not_cover_the_curve(monkeypatch: pytest.MonkeyPatch, objective_ms: int, side: str) -> None:
    ttft, *_ = figure_of(serve_result(objectives=Objectives(ttft=objective_ms)), monkeypatch).axes
    ttft.figure.canvas.draw()
    assert ttft.texts[0].get_horizontalalignment() == side
    assert not ttft.lines[0].get_path().transformed(ttft.transData).intersects_bbox(ttft.texts[0].get_window_extent())
