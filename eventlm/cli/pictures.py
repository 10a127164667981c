"""What all pictures of the command line have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 8.0
HEIGHT_INCHES = 4.5
DOTS_PER_INCH = 120


def new_figure(width_inches: float = WIDTH_INCHES, height_inches: float = HEIGHT_INCHES) -> Figure:
    """An empty picture."""
    # The objects themselves, not pyplot: no window system is asked for, no figure is kept.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_grid(axes: Axes) -> None:
    """Lines behind what is drawn, and no frame above and to the right."""
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
