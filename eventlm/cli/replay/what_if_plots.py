"""Pictures of a what-if: how latencies are distributed in each run, and what their quantiles are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventlm.cli.pictures import HEIGHT_INCHES, add_grid, new_figure
from eventlm.errors import UsageError
from eventlm.replay.outcome import LATENCIES, RunOutcome
from eventlm.replay.what_if.compare import Metric
from eventlm.replay.what_if.what_if import WhatIfResult
from eventlm.types import NANOSECONDS_PER_MILLISECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Latency, and what the axis says.
PICTURES = (("ttft", "time to first token"), ("e2e", "end-to-end time"))
#: Of the picture with a pair of bars for each run.
INCHES_PER_RUN = 0.6
#: Over so many times the median an axis is logarithmic.
_LOG_RATIO = 20
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


def plot(result: WhatIfResult, folder: str) -> Iterator[Path]:
    """Write the pictures, yielding the path of each. Raises UsageError if the folder cannot be written."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for latency, label in PICTURES:
            path = target / f"{latency}_cdf.png"
            yield _save(path, result, functools.partial(_cdfs, result=result, latency=latency, label=label))
        height = INCHES_PER_RUN * (2 + len(result.alternatives)) + 1
        yield _save(target / "quantiles.png", result, lambda figure: _bars(figure, result), height=height)
    except OSError as error:
        raise UsageError(f"cannot write pictures to {folder}: {error.strerror}; choose another folder") from error


def _save(path: Path, result: WhatIfResult, draw: Callable[[Figure], Any], *, height: float = 0) -> Path:
    figure = new_figure(height_inches=max(HEIGHT_INCHES, height))
    draw(figure)
    title = f"what if: {result.header.core.models[0]}, run {result.header.run}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, color="0.35")
    figure.savefig(path)
    return path


def _axes(figure: Figure, *place: int) -> Axes:
    axes = figure.add_subplot(*place)
    add_grid(axes)
    return axes


def _runs(result: WhatIfResult) -> list[tuple[str, RunOutcome, dict[str, Any]]]:
    """Name, outcome and style of each."""
    found: list[tuple[str, RunOutcome, dict[str, Any]]] = [
        ("recorded", result.recorded, {"color": "0.55", "linestyle": ":"}),
        ("baseline", result.baseline.outcome, {"color": "0.2", "linestyle": "--"}),
    ]
    for place, each in enumerate(result.alternatives):
        style = {"color": _COLOURS[place % len(_COLOURS)], "linestyle": "-" if place < len(_COLOURS) else "-."}
        found.append((each.name, each.outcome, style))
    return found


def _cdfs(figure: Figure, result: WhatIfResult, latency: str, label: str) -> None:
    axes = _axes(figure)
    largest = smallest = median = 0.0
    for name, outcome, style in _runs(result):
        values_ns = sorted(
            value for s in outcome.sequences if s.is_complete and (value := LATENCIES[latency](s)) is not None
        )
        if not values_ns:
            continue
        xs = [value / NANOSECONDS_PER_MILLISECOND for value in values_ns]
        shares = [(place + 1) / len(xs) for place in range(len(xs))]
        axes.plot([xs[0], *xs], [0.0, *shares], drawstyle="steps-post", linewidth=1.6, label=name, **style)
        largest, median = max(largest, xs[-1]), max(median, xs[len(xs) // 2])
        smallest = min(smallest or xs[0], xs[0])
    if smallest > 0 and largest > _LOG_RATIO * median:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{label}, ms")
    axes.set_ylabel("share of sequences")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _bars(figure: Figure, result: WhatIfResult) -> None:
    metrics = {metric.name: metric for metric in result.comparison.metrics}
    names = [name for name, *_ in _runs(result)]
    for column, (latency, label) in enumerate(PICTURES, start=1):
        axes = _axes(figure, 1, len(PICTURES), column)
        for quantile, shift, lightness in (("p50", -0.2, 0.45), ("p99", 0.2, 1.0)):
            metric = metrics[f"{latency}_{quantile}"]
            values = _values(metric)
            colours = [style["color"] for *_, style in _runs(result)]
            rows = [place + shift for place in range(len(names))]
            axes.barh(rows, values, height=0.36, color=colours, alpha=lightness)
            bar = (metric.error_bar or 0) / NANOSECONDS_PER_MILLISECOND
            # What is modelled has an error bar, what was measured has none.
            axes.errorbar(values[1:], rows[1:], xerr=bar, fmt="none", ecolor="0.3", elinewidth=0.8, capsize=2)
            for place, (row, value) in enumerate(zip(rows, values, strict=True)):
                end = value + bar * (place > 0)
                axes.annotate(f" {quantile} {value:,.0f}", (end, row), va="center", fontsize=7, color="0.35")
        axes.set_yticks(range(len(names)), names if column == 1 else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{label}, ms")


def _values(metric: Metric) -> list[float]:
    """Of the record, the baseline and each alternative, in ms."""
    values = [metric.recorded, metric.baseline, *(cell.value for cell in metric.alternatives)]
    return [(value or 0) / NANOSECONDS_PER_MILLISECOND for value in values]
