"""What `cost.py` has measured: its cliffs, as tables, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from eventlm.bench.step.machine_probe import Machine
from eventlm.table import table
from eventlm.types import ceil_div

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of the x axis of each plot.
LABELS = {
    "context": "tokens of context, a token each",
    "batch": "sequences, a token each",
    "chunk": "tokens of a prompt",
    "behind": "tokens before 256 of a prompt",
}


class Point(NamedTuple):
    """A step: `num_rows` sequences compute `num_tokens` tokens each after `context` others. x: as plotted."""

    x: int
    num_rows: int
    num_tokens: int
    context: int

    @property
    def num_all_tokens(self) -> int:
        return self.num_rows * self.num_tokens


class Series(NamedTuple):
    """One line of a plot. grows: whether x is the number of tokens of a step."""

    plot: str
    name: str
    points: list[Point]
    grows: bool


class Cost(NamedTuple):
    """A point, measured. Times of a step in ns."""

    point: Point
    least_ns: int
    floor_ns: float

    @property
    def token_ms(self) -> float:
        return self.least_ns / 1e6 / self.point.num_all_tokens

    @property
    def floor_token_ms(self) -> float:
        return self.floor_ns / 1e6 / self.point.num_all_tokens


class Cliff(NamedTuple):
    """A point that costs `excess` more than it should by its neighbours, a share."""

    point_index: int
    excess: float


class Measured(NamedTuple):
    """A line, measured, and what the machine gave meanwhile, which its floors follow from."""

    series: Series
    machine: Machine
    costs: list[Cost]


def cliffs(costs: Sequence[Cost], tolerance: float, *, grows: bool) -> list[Cliff]:
    """Points whose cost per token is above the line between their neighbours, or above that of a smaller step."""
    found = []
    for index in range(1, len(costs)):
        own, before = costs[index], costs[index - 1]
        expected = []
        if index + 1 < len(costs):
            after = costs[index + 1]
            share = (own.point.x - before.point.x) / (after.point.x - before.point.x)
            expected.append(before.token_ms + share * (after.token_ms - before.token_ms))
        if grows:
            # A longer prompt attends to more.
            expected.append(before.token_ms * max(1.0, own.floor_token_ms / before.floor_token_ms))
        excess = own.token_ms / min(expected) - 1 if expected else 0.0
        if excess > tolerance:
            found.append(Cliff(index, excess))
    return found


def render(measured: Measured, found: Iterable[Cliff]) -> Iterator[str]:
    """The lines of a table."""
    series = measured.series
    marks = {cliff.point_index: f"{cliff.excess:+.0%}" for cliff in found}
    rows = [
        [
            f"{cost.point.x:,}",
            f"{cost.least_ns / 1e6:.1f}",
            f"{cost.token_ms:.3f}",
            f"{cost.floor_ns / 1e6:.1f}",
            f"{cost.least_ns / cost.floor_ns:.2f}",
            marks.get(number, ""),
        ]
        for number, cost in enumerate(measured.costs)
    ]
    yield f"{series.plot}, {series.name}; the machine {measured.machine}"
    yield from table((series.plot, "step ms", "ms a token", "floor ms", "x floor", "cliff"), rows, left=())


def as_json(backend: str, measured: Iterable[Measured]) -> dict[str, Any]:
    """The same, for programs."""
    lines, points = [], []
    for series, machine, costs in measured:
        line = {"plot": series.plot, "series": series.name}
        lines.append(line | msgspec.structs.asdict(machine))
        points += [
            line | cost.point._asdict() | {"least_ns": cost.least_ns, "floor_ns": cost.floor_ns} for cost in costs
        ]
    return {"backend": backend, "machines": lines, "points": points}


def plot(path: Path, measured: list[Measured], tolerance: float, title: str) -> None:
    """Write a PNG, a panel for each plot: cost per token beside its floor, cliffs marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(each.series.plot for each in measured))
    figure = Figure(figsize=(5.5 * min(len(names), 2), 4 * ceil_div(len(names), 2)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(ceil_div(len(names), 2), min(len(names), 2), squeeze=False).flatten()
    for panel in panels[len(names) :]:
        panel.set_axis_off()
    for panel, name in zip(panels, names, strict=False):
        _plot_panel(panel, [each for each in measured if each.series.plot == name], tolerance)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _plot_panel(axes: Axes, measured: list[Measured], tolerance: float) -> None:
    for (series, _, costs), colour in zip(measured, ("#1f5fa8", "#dd8f2e"), strict=False):
        indices = [cost.point.x for cost in costs]
        axes.plot(indices, [cost.token_ms for cost in costs], "o-", color=colour, markersize=3.5, label=series.name)
        axes.plot(
            indices,
            [cost.floor_token_ms for cost in costs],
            "--",
            color=colour,
            linewidth=1,
            label=f"{series.name}, floor",
        )
        found = cliffs(costs, tolerance, grows=series.grows)
        axes.plot(
            [indices[cliff.point_index] for cliff in found],
            [costs[cliff.point_index].token_ms for cliff in found],
            *("o",),
            markersize=10,
            markerfacecolor="none",
            color="#b04a2f",
        )
    if measured[0].series.grows:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    else:
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    axes.set_xlabel(LABELS[measured[0].series.plot])
    axes.set_ylabel("ms a token")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
