"""What all pictures have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eventlm.errors import UsageError
from eventlm.types import NANOSECONDS_PER_MILLISECOND

WIDTH_INCHES = 8.0
HEIGHT_INCHES = 4.5
DOTS_PER_INCH = 120
#: An axis is logarithmic where the largest value is more than so many times a typical one.
LOG_RATIO = 20
GREY = "0.35"


def new_figure(width_inches: float = WIDTH_INCHES, height_inches: float = HEIGHT_INCHES) -> Figure:
    """An empty picture."""
    # The objects themselves, not pyplot: no window system is asked for, no figure is kept.
    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(figure: Figure, *index: int) -> Axes:
    """Axes with a grid below what is drawn, and no frame above and to the right."""
    axes = figure.add_subplot(*index)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save_pictures(
    folder: str, title: str, pictures: Iterable[tuple[str, Callable[[Figure], object]]]
) -> Iterator[Path]:
    """Draw and write a PNG of each name, yielding its path. Raises UsageError if the folder cannot be written."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, draw in pictures:
            figure = new_figure()
            draw(figure)
            figure.suptitle(title, x=0.01, ha="left", fontsize=9, color=GREY)
            figure.savefig(path := target / f"{name}.png")
            yield path
    except OSError as error:
        raise UsageError(f"cannot write pictures to {folder}: {error.strerror}; choose another folder") from error


def draw_cdfs(axes: Axes, lines: Sequence[tuple[Counter[int], dict[str, Any]]], label: str) -> None:
    """The distribution of times in ns, each with the style of its line, over an axis in ms that `label` names."""
    smallest, median, largest = float("inf"), 0.0, 0.0
    for values_ns, style in lines:
        if values_ns:
            xs = numpy.array(sorted(values_ns)) / NANOSECONDS_PER_MILLISECOND
            axes.plot([xs[0], *xs], [0.0, *_shares(values_ns)], drawstyle="steps-post", **style)
            smallest, largest = min(smallest, xs[0]), max(largest, xs[-1])
            median = max(median, quantile_ms(values_ns, 0.5))
    if smallest > 0 and largest > LOG_RATIO * median:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{label}, ms")


def quantile_ms(values_ns: Counter[int], share: float) -> float:
    """The smallest value in ms that so large a share of all do not exceed."""
    return sorted(values_ns)[int(numpy.searchsorted(_shares(values_ns), share))] / NANOSECONDS_PER_MILLISECOND


def _shares(values_ns: Counter[int]) -> Any:
    """For each distinct value in ascending order, the share of all that do not exceed it."""
    return numpy.cumsum([values_ns[value] for value in sorted(values_ns)]) / values_ns.total()
