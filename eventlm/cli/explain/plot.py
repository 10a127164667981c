"""A bar for each sequence, from its reception on, coloured by what each moment went to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from eventlm.errors import UsageError
from eventlm.pictures import new_figure
from eventlm.replay.explain.result import Explanation, Interval
from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND

WIDTH_INCHES = 9.0
BAR_INCHES = 0.34
#: Title, axis and legend.
MARGIN_INCHES = 1.9
MIN_BAR_INCHES = 0.6
#: As many as fit beside each other with the longest names.
LEGEND_COLUMNS = 3
#: Waits are warm, work is cool, what lies outside the engine is grey.
EDGE, WAITS_OTHER, CUT = "#9a9a9a", "#f2cf8d", "#4a4a4a"
WAITS = {
    "sequence_limit": ("waiting: sequence limit", "#b2352d"),
    "blocks": ("waiting: blocks", "#e0703a"),
    "token_budget": ("waiting: token budget", "#efa63c"),
    "steps_in_flight": ("waiting: steps in flight", "#f7c873"),
    "head_of_line": ("waiting: head of the line", "#8f4a6b"),
    "stage_wait": ("waiting: a stage", "#d99a2b"),
    "worker": ("waiting: no worker", "#5c4033"),
    "paused": ("waiting: paused", "#c9a9a6"),
    "grammar": ("waiting: grammar", "#c46aa1"),
}
WORK = {
    "prefill": ("computing the prompt", "#1f5fa8"),
    "decode": ("decoding", "#4fa3d8"),
    "recompute": ("computing again", "#7d5fb2"),
    "preempted": ("rows in flight", "#b9a3dc"),
}


class Colour(NamedTuple):
    """An entry of the legend."""

    name: str
    colour: str


MIXED = Colour("decoding beside prompts of others", "#2f7fae")


def plot(explanations: Sequence[Explanation], path: str) -> None:
    """Write the picture. Raises UsageError if the file cannot be written."""
    try:
        make_figure(explanations).savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write the picture {path}: {error.strerror}; choose another path") from error


def make_figure(explanations: Sequence[Explanation]) -> Figure:
    """The picture, as long as its bars need."""
    height = MARGIN_INCHES + max(BAR_INCHES * len(explanations), MIN_BAR_INCHES)
    figure = new_figure(WIDTH_INCHES, height)
    _bars(figure.add_subplot(), explanations)
    return figure


def _bars(axes: Axes, explanations: Sequence[Explanation]) -> None:
    longest_ns = max((each.total_ns for each in explanations), default=1)
    is_long = longest_ns >= 10 * NANOSECONDS_PER_SECOND
    unit_ns, unit = (NANOSECONDS_PER_SECOND, "s") if is_long else (NANOSECONDS_PER_MILLISECOND, "ms")
    totals: dict[Colour, int] = {}
    for index, explanation in enumerate(explanations):
        spans: dict[Colour, list[tuple[float, float]]] = {}
        for colour, start_ns, end_ns in _merged(explanation):
            span = (start_ns - explanation.start_ns) / unit_ns, (end_ns - start_ns) / unit_ns
            spans.setdefault(colour, []).append(span)
            totals[colour] = totals.get(colour, 0) + end_ns - start_ns
        for colour, ranges in spans.items():
            axes.broken_barh(ranges, (index - 0.36, 0.72), facecolors=colour.colour, linewidth=0)
        if explanation.first_token_ns is not None:
            x = (explanation.first_token_ns - explanation.start_ns) / unit_ns
            axes.plot([x, x], [index - 0.44, index + 0.44], color="black", linewidth=1.4)
    axes.set_yticks(range(len(explanations)), [explanation.name for explanation in explanations])
    axes.set_ylim(len(explanations) - 0.4, -0.6)
    axes.set_xlim(0, 1.01 * longest_ns / unit_ns or 1)
    axes.set_xlabel(f"time since the request was received, {unit} (black: its first token)")
    axes.set_ylabel("request")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour.colour, label=colour.name) for colour in sorted(totals, key=lambda c: -totals[c])]
    axes.legend(
        handles=patches, frameon=False, fontsize=8, ncols=LEGEND_COLUMNS, loc="lower left", bbox_to_anchor=(0, 1.0)
    )


def _merged(explanation: Explanation) -> Iterator[tuple[Colour, int, int]]:
    """Neighbours of one colour as one."""
    mixed = {(step.replica, step.step) for step in explanation.steps if step.num_chunk_tokens}

    def colour_of(interval: Interval) -> Colour:
        is_decode = interval.phase == "decode" and interval.cause == "step"
        return MIXED if is_decode and (interval.replica, interval.steps[0]) in mixed else _colour(interval)

    for colour, intervals in groupby(explanation.intervals, key=colour_of):
        neighbours = list(intervals)
        yield colour, neighbours[0].start_ns, neighbours[-1].end_ns


def _colour(interval: Interval) -> Colour:
    """By cause where it waits, else by what it was computed for."""
    if interval.phase in ("edge", "unseen"):
        return Colour("outside the log" if interval.phase == "unseen" else "before the scheduler", EDGE)
    if interval.cause == "text_end":
        return Colour("end of the text", "#6fae6f")
    if interval.cause in WAITS:
        return Colour(*WAITS[interval.cause])
    if interval.cause == "step":
        return Colour(*WORK[interval.phase])
    if interval.cause in ("other_step", "dispatch", "return"):
        return Colour("between engine and worker", "#a9c9c4")
    if interval.cause == "exchange":
        return Colour("from stage to stage", "#86b0aa")
    if interval.cause == "engine_down":
        return Colour("engine down", "#8c4a5b")
    if interval.cause in ("lost_step", "cut_step"):
        return Colour("in steps that never completed", CUT)
    return Colour("waiting: other reasons", WAITS_OTHER)
