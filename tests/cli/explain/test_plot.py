"""The picture of explanations: what is drawn where, in which colour."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from eventlm.cli.explain.plot import MIXED, WAITS, WORK, _bars, _merged, make_figure
from eventlm.replay.explain.explainer import explain
from tests.replay.explain.test_story import made, step, timeline
from tests.replay.explained_logs import read
from tests.replay.golden import FOLDER, GOLDEN


@pytest.fixture
def axes() -> Axes:
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def test_neighbours_of_one_colour_are_one_bar_and_decodes_beside_prompts_have_their_own() -> None:
    where: dict[str, Any] = {"replica": 0}
    found = made(
        timeline(
            (2, "queue", "sequence_limit", where),
            (1, "preempted", "sequence_limit", where),
            (4, "decode", "step", where | {"steps": [1]}),
            (5, "decode", "step", where | {"steps": [2]}),
            (6, "decode", "step", where | {"steps": [3]}),
        ),
        steps=[step(1), step(2), step(3, num_chunk_tokens=7)],
    )
    assert [(each.name, start_ns, end_ns) for each, start_ns, end_ns in _merged(found)] == [
        (WAITS["sequence_limit"][0], 0, 3_000_000),
        (WORK["decode"][0], 3_000_000, 12_000_000),
        (MIXED.name, 12_000_000, 18_000_000),
    ]


@pytest.mark.parametrize("name", GOLDEN)
def test_bars_are_as_long_as_the_requests_and_the_legend_names_each_colour(name: str, axes: Axes) -> None:
    log = read(FOLDER / f"{name}.jsonl")
    explanations = [each for each in explain(log.path, log.requests).explanations if each.intervals]
    _bars(axes, explanations)
    assert [label.get_text() for label in axes.get_yticklabels()] == [each.name for each in explanations]
    drawn: dict[int, float] = {}
    colours = set()
    for collection in axes.collections:
        colours.add(tuple(collection.get_facecolor()[0][:3]))
        for path in collection.get_paths():
            box = path.get_extents()
            index = round((box.y0 + box.y1) / 2)
            drawn[index] = drawn.get(index, 0.0) + box.width
    assert {index: pytest.approx(each.total_ns / 1e6) for index, each in enumerate(explanations)} == drawn
    legend = axes.get_legend()
    assert legend is not None
    assert {to_rgb(patch.get_facecolor()) for patch in legend.get_patches()} == colours
    assert len({text.get_text() for text in legend.get_texts()}) == len(legend.get_texts())
    assert len(axes.lines) == sum(each.first_token_ns is not None for each in explanations)


def test_a_legend_of_all_colours_is_no_wider_than_the_bars() -> None:
    kinds: list[tuple[Any, ...]] = [(1, phase, "step", {"steps": [1]}) for phase in WORK]
    kinds += [(1, "queue", cause) for cause in WAITS]
    kinds += [
        (1, "decode", "lost_step"),
        (1, "decode", "dispatch"),
        (1, "decode", "exchange"),
        (1, "text_end", "text_end"),
        (1, "queue", "trial"),
    ]
    kinds += [(1, "edge", "tokenizing"), (1, "decode", "step", {"replica": 0, "steps": [2]})]
    figure = make_figure([made(timeline(*kinds), steps=[step(2, num_chunk_tokens=1)])])
    (axes,) = figure.axes
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == len(kinds)
    box = legend.get_window_extent()
    # One that is wider than the bars takes room from them, and may be cut off nevertheless.
    assert box.x1 <= axes.get_window_extent().x1
    assert box.y1 <= figure.bbox.height


def test_seconds_for_long_ones(axes: Axes) -> None:
    _bars(axes, [made(timeline((12_000, "queue", "blocks")))])
    assert axes.get_xlabel().startswith("time since the request was received, s ")
    assert axes.get_xlim()[1] == pytest.approx(12.12)
