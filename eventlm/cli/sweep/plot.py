"""The picture of a sweep: a latency against the load, one line for each configuration."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes

from eventlm.pictures import GREY, HEIGHT_INCHES, LOG_RATIO, new_axes, new_figure
from eventlm.replay.sweep.slo import Limit
from eventlm.replay.sweep.sweep import SweepResult

_MARKERS = "osD^vP*X"


def plot_sweep(result: SweepResult, path: Path) -> None:
    """One panel for each limit of the SLO; without one the p99 of TTFT. Raises OSError."""
    limits = result.plan.limits or [Limit("p99", "ttft", 0)]
    figure = new_figure(height_inches=HEIGHT_INCHES * len(limits))
    for index, limit in enumerate(limits, start=1):
        _panel(new_axes(figure, len(limits), 1, index), result, limit)
    figure.savefig(path)


def _panel(axes: Axes, result: SweepResult, limit: Limit) -> None:
    all_values: list[float] = []
    for index, each in enumerate(result.configurations):
        found = {load_ppm / 1e6: limit.value_ms(summary) for load_ppm, summary in each.summaries.items()}
        points = {load: value for load, value in found.items() if value is not None}
        all_values += points.values()
        marker = _MARKERS[index % len(_MARKERS)]
        axes.plot([*points], [*points.values()], marker=marker, markersize=4, linewidth=1.4, label=each.name)
    if limit.limit_ms:
        axes.axhline(limit.limit_ms, color=GREY, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"SLO {limit.limit_ms:g} ms", (0, limit.limit_ms), xycoords=("axes fraction", "data"), xytext=(4, 3),
            textcoords="offset points", fontsize=8, color=GREY,
        )  # fmt: skip
    if all_values and min(all_values) > 0 and max(all_values) > LOG_RATIO * min(all_values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(f"load (1: {result.requests_per_second:.2f} requests/s)")
    axes.set_ylabel(f"{limit.quantile} {limit.metric.upper()}, ms")
    axes.legend(frameon=False, fontsize=8)
