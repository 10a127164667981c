"""The picture of a load test: how its latencies are distributed, and how many requests were running over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from eventlm.bench.serve_bench import ServeResult
from eventlm.bench.statistics import Statistics, concurrency
from eventlm.config.objectives import Objectives
from eventlm.pictures import new_axes, new_figure

_PERCENTILES = (50, 90, 99)
_LINE = "#1f5fa8"
_MARK = "#b04a2f"
#: Above this ratio of the largest to the smallest a linear axis would show only the tail.
_LOG_RATIO = 50.0


def plot_load(path: Path, result: ServeResult, statistics: Statistics) -> None:
    """Write a PNG. Raises OSError."""
    successes = [record for record in result.load.records if record.is_success]
    figure = new_figure(11, 7.5)
    objectives = result.options.objectives or Objectives()
    tpot_ns = [record.tpot_ns for record in successes if record.tpot_ns is not None]
    for index, title, values_ns, objective_ms in (
        (1, "time to first token", [record.ttft_ns for record in successes], objectives.ttft),
        (2, "time per output token after the first", tpot_ns, objectives.tpot),
        (3, "end-to-end latency", [record.e2e_ns for record in successes], objectives.e2e),
    ):
        _plot_cdf(new_axes(figure, 2, 2, index), title, [value / 1e6 for value in values_ns], objective_ms)
    _plot_over_time(new_axes(figure, 2, 2, 4), result)
    figure.suptitle(
        f"{result.model}: {statistics.num_success:,} of {statistics.num_requests:,} requests succeeded, "
        f"{statistics.requests_per_second:.2f} requests/s, {statistics.output_tokens_per_second:,.0f} output tokens/s",
        fontsize=12,
    )
    figure.savefig(path)


def _plot_cdf(axes: Axes, title: str, values_ms: Sequence[float], objective_ms: float | None) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    if not values_ms:
        axes.text(0.5, 0.5, "no successful request", transform=axes.transAxes, ha="center", va="center")
        axes.set_xticks([])
        return
    ordered = numpy.sort(numpy.asarray(values_ms))
    unit, scale = ("s", 1e-3) if ordered[-1] >= 10_000 else ("ms", 1.0)
    ordered = ordered * scale
    axes.set_xlabel(unit)
    if ordered[0] > 0 and ordered[-1] / ordered[0] > _LOG_RATIO:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    shares = numpy.arange(len(ordered) + 1) / len(ordered)
    axes.step(numpy.concatenate(([ordered[0]], ordered)), shares, where="post", color=_LINE, linewidth=1.8)
    percentiles = [(percent, float(numpy.percentile(ordered, percent))) for percent in _PERCENTILES]
    legend = [f"p{percent} {_number(value)} {unit}" for percent, value in percentiles]
    if objective_ms is not None:
        axes.axvline(objective_ms * scale, color=_MARK, linestyle="--", linewidth=1.2)
        legend.append(f"objective {_number(objective_ms * scale)} {unit}")
    # Below or above the curve, where there is more room.
    axes.autoscale_view()
    is_right = (axes.transData - axes.transAxes).transform((ordered[len(ordered) // 2], 0))[0] > 0.5
    axes.text(
        0.03 if is_right else 0.97,
        0.94 if is_right else 0.06,
        "\n".join(legend),
        transform=axes.transAxes,
        ha="left" if is_right else "right",
        va="top" if is_right else "bottom",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "0.8", "alpha": 0.9},
    )


def _number(value: float) -> str:
    """At least three digits, without an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _plot_over_time(axes: Axes, result: ServeResult) -> None:
    """Requests under way over time, and a mark for each that failed."""
    records = result.load.records
    axes.set_title("requests under way", fontsize=11)
    axes.set_xlabel("s after the start")
    axes.set_ylabel("requests")
    steps = concurrency(records)
    times_s = [0.0] + [time_ns / 1e9 for time_ns, _ in steps]
    axes.step(times_s, [0] + [running for _, running in steps], where="post", color=_LINE, linewidth=1.5)
    # Room for the legend above the curve.
    axes.set_ylim(0, 1.2 * max([1] + [running for _, running in steps]))
    axes.set_xlim(left=0)
    failed = [record.end_ns / 1e9 for record in records if not record.is_success]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color=_MARK, clip_on=False, label=f"failed: {len(failed):,}")
        axes.legend(loc="upper right", fontsize=9)
