"""The picture of a sweep: a latency against the load, one line for each configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventlm.cli.pictures import HEIGHT_INCHES, add_grid, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from eventlm.replay.sweep.slo import Limit
    from eventlm.replay.sweep.sweep import SweepResult

#: Beyond this ratio of the largest value to the smallest the axis is logarithmic.
_LOG_RATIO = 20
_MARKERS = "osD^vP*X"


def plot_sweep(result: SweepResult, path: Path) -> None:
    """One panel for each limit of the SLO; without one the p99 of TTFT. Raises OSError."""
    from eventlm.replay.sweep.slo import Limit

    limits = result.plan.limits or [Limit("p99", "ttft", 0)]
    figure = new_figure(height_inches=HEIGHT_INCHES * len(limits))
    panels = figure.subplots(len(limits), 1, squeeze=False)
    for axes, limit in zip(panels[:, 0], limits, strict=True):
        _panel(axes, result, limit)
    figure.savefig(path)


def _panel(axes: Axes, result: SweepResult, limit: Limit) -> None:
    add_grid(axes)
    all_values = []
    for place, each in enumerate(result.configurations):
        found = [(load_ppm, limit.value_ms(summary)) for load_ppm, summary in each.summaries.items()]
        points = [(load_ppm / 1e6, value) for load_ppm, value in found if value is not None]
        all_values += [value for _, value in points]
        axes.plot(
            [load for load, _ in points],
            [value for _, value in points],
            marker=_MARKERS[place % len(_MARKERS)],
            markersize=4,
            linewidth=1.4,
            label=each.name,
        )
    if limit.limit_ms:
        axes.axhline(limit.limit_ms, color="0.35", linewidth=1.0, linestyle="--")
        axes.annotate(
            f"SLO {limit.limit_ms:g} ms",
            (0, limit.limit_ms),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8,
            color="0.35",
        )
    if all_values and min(all_values) > 0 and max(all_values) > _LOG_RATIO * min(all_values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(f"load (1: {result.requests_per_second:.2f} requests/s)")
    axes.set_ylabel(f"{limit.quantile} {limit.metric.upper()}, ms")
    axes.legend(frameon=False, fontsize=8)
