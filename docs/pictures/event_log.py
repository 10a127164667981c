"""Draw the picture of the README: `python docs/pictures/event_log.py` writes event-log.svg beside this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

STYLE = {"svg.hashsalt": "eventlm", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 11}
INK, GREY, PAPER = "#1f2430", "#6b7280", "#ffffff"
FACT, DECISION, CORE = "#2f7ed8", "#e07b39", "#2e9e6b"
#: The log's first events: tag and kind.
LOG = (
    ("arrive", FACT),
    ("admit", DECISION),
    ("launch", DECISION),
    ("arrive", FACT),
    ("admit", DECISION),
    ("done", FACT),
    ("emit", DECISION),
    ("launch", DECISION),
    ("done", FACT),
    ("finish", DECISION),
)
READERS = (
    ("verify", "the same decisions\nagain, byte for byte"),
    ("explain", "where each millisecond\nof a request went"),
    ("what if", "another policy\non the same work"),
    ("simulate", "an hour of traffic\nin seconds"),
    ("measure", "metrics and\ncomparisons"),
)


def draw(path: Path) -> None:
    """Write the picture; the same bytes each time."""
    figure, axes = pyplot.subplots(figsize=(10, 5.4))
    axes.set(xlim=(0, 100), ylim=(0, 54))
    axes.axis("off")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)

    _box(axes, 3, 38, 24, 13, GREY, "outside", "HTTP clients\nworker processes\nthe clock, the disk")
    _box(axes, 62, 38, 35, 13, CORE, "core", "policy, batching, KV blocks, preemption\nno clock, no I/O, no randomness")
    _arrow(axes, (27.5, 47.5), (61.5, 47.5), FACT)
    axes.text(44.5, 48.6, "facts", ha="center", color=FACT, weight="bold")
    _arrow(axes, (61.5, 41), (27.5, 41), DECISION)
    axes.text(44.5, 42.1, "decisions", ha="center", color=DECISION, weight="bold")
    _arrow(axes, (44.5, 40), (44.5, 32.2), GREY)
    axes.text(45.8, 35.6, "every event is written to one ordered log", va="center", color=GREY, size=10)

    width = 94 / len(LOG)
    for index, (tag, colour) in enumerate(LOG):
        left = 3 + index * width
        axes.add_patch(
            FancyBboxPatch(
                (left + 0.35, 24), width - 0.7, 7, boxstyle="round,pad=0,rounding_size=0.8", fc=colour, ec="none"
            )
        )
        axes.text(left + width / 2, 28.4, tag, ha="center", va="center", color=PAPER, weight="bold", size=11)
        axes.text(left + width / 2, 25.7, str(index + 1), ha="center", va="center", color=PAPER, size=9)
    axes.text(50, 21.2, "trace.jsonl", ha="center", va="center", color=GREY, size=10, family="DejaVu Sans Mono")

    for index, (title, text) in enumerate(READERS):
        centre = 3 + 94 * (index + 0.5) / len(READERS)
        _arrow(axes, (centre, 19.3), (centre, 15.2), GREY)
        axes.text(centre, 12.9, title, ha="center", va="center", color=INK, weight="bold", size=12)
        axes.text(centre, 10.6, text, ha="center", va="top", color=INK, size=9.5, linespacing=1.35)
    axes.text(
        50, 1.9, "Replays and simulations run the same core that served the requests.", ha="center", color=GREY, size=10
    )

    figure.savefig(path, facecolor=PAPER, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    pyplot.close(figure)


def _box(axes: Any, x: float, y: float, width: float, height: float, colour: str, title: str, text: str) -> None:
    shape = "round,pad=0,rounding_size=1.2"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=colour + "14", ec=colour, lw=1.6))
    centre = x + width / 2
    axes.text(centre, y + height - 2.6, title, ha="center", va="center", color=colour, weight="bold", size=13)
    axes.text(centre, y + (height - 4) / 2, text, ha="center", va="center", color=INK, size=10, linespacing=1.4)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, lw=1.8, color=colour))


if __name__ == "__main__":
    matplotlib.use("agg")
    matplotlib.rcParams |= STYLE
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("event-log.svg"))
