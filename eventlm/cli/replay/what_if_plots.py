"""Pictures of a what-if: how latencies are distributed in each run, and what their quantiles are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eventlm.pictures import GREY, HEIGHT_INCHES, draw_cdfs, new_axes, save_pictures
from eventlm.replay.outcome import LATENCIES, RunOutcome
from eventlm.replay.what_if.compare import Metric
from eventlm.replay.what_if.what_if import WhatIfResult
from eventlm.types import NANOSECONDS_PER_MILLISECOND

#: Latency, and the label of its axis.
PICTURES = (("ttft", "time to first token"), ("e2e", "end-to-end time"))
#: Height of each run in the picture of quantiles.
INCHES_PER_RUN = 0.6
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


def plot(result: WhatIfResult, folder: str) -> Iterator[Path]:
    """Write the pictures, yielding the path of each. Raises UsageError if the folder cannot be written."""
    title = f"what if: {', '.join(result.header.model_names)}, run {result.header.run}"
    cdfs = (
        (f"{latency}_cdf", partial(_cdfs, result=result, latency=latency, label=label)) for latency, label in PICTURES
    )
    return save_pictures(folder, title, [*cdfs, ("quantiles", partial(_bars, result=result))])


def _runs(result: WhatIfResult) -> list[tuple[str, RunOutcome, dict[str, Any]]]:
    """Name, outcome and style of each."""
    found: list[tuple[str, RunOutcome, dict[str, Any]]] = [
        ("recorded", result.recorded, {"color": "0.55", "linestyle": ":"}),
        ("baseline", result.baseline.outcome, {"color": "0.2", "linestyle": "--"}),
    ]
    for index, each in enumerate(result.alternatives):
        style = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": "-" if index < len(_COLOURS) else "-."}
        found.append((each.name, each.outcome, style))
    return found


def _cdfs(figure: Figure, result: WhatIfResult, latency: str, label: str) -> None:
    axes = new_axes(figure)
    lines = []
    for name, outcome, style in _runs(result):
        values_ns = (getattr(each, LATENCIES[latency]) for each in outcome.sequences if each.is_complete)
        found = Counter(value for value in values_ns if value is not None)
        lines.append((found, {"linewidth": 1.6, "label": name} | style))
    draw_cdfs(axes, lines, label)
    axes.set_ylabel("share of sequences")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _bars(figure: Figure, result: WhatIfResult) -> None:
    figure.set_figheight(max(HEIGHT_INCHES, INCHES_PER_RUN * (2 + len(result.alternatives)) + 1))
    metrics = {metric.name: metric for metric in result.comparison.metrics}
    names = [name for name, *_ in _runs(result)]
    for column, (latency, label) in enumerate(PICTURES, start=1):
        axes = new_axes(figure, 1, len(PICTURES), column)
        for quantile, shift, lightness in (("p50", -0.2, 0.45), ("p99", 0.2, 1.0)):
            metric = metrics[f"{latency}_{quantile}"]
            values = _values(metric)
            colours = [style["color"] for *_, style in _runs(result)]
            rows = [index + shift for index in range(len(names))]
            axes.barh(rows, values, height=0.36, color=colours, alpha=lightness)
            bar = (metric.error_bar or 0) / NANOSECONDS_PER_MILLISECOND
            # What is modelled has an error bar, what was measured has none.
            axes.errorbar(values[1:], rows[1:], xerr=bar, fmt="none", ecolor="0.3", elinewidth=0.8, capsize=2)
            for index, (row, value) in enumerate(zip(rows, values, strict=True)):
                end = value + bar * (index > 0)
                axes.annotate(f" {quantile} {value:,.0f}", (end, row), va="center", fontsize=7, color=GREY)
        axes.set_yticks(range(len(names)), names if column == 1 else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{label}, ms")


def _values(metric: Metric) -> list[float]:
    """Of the record, the baseline and each alternative, in ms."""
    values = [metric.recorded, metric.baseline, *(cell.value for cell in metric.alternatives)]
    return [(value or 0) / NANOSECONDS_PER_MILLISECOND for value in values]
