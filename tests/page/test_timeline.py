"""The timeline: what is packed, what is drawn, and what its reader does."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from playwright.sync_api import Locator, expect

from eventlm.page.timeline import MARKS, PHASES, pack_timeline
from tests.page.gallery import gallery_data, timeline_data
from tests.page.opened_file import OpenedFile, functions_run

OpenFile = Callable[..., OpenedFile]
DESK = {"viewport": {"width": 1440, "height": 900}}
PICTURE = Path(__file__).parent / "timeline.png"
STATIC = Path(__file__).parents[2] / "eventlm" / "page" / "static"
#: Left and above of the plot, and below it, in pixels.
LEFT, TOP, BOTTOM = 112, 16, 22


def stage(page: OpenedFile) -> Locator:
    return page.page.get_by_role("application", name="Timeline of requests")


def readout(page: OpenedFile) -> Locator:
    return page.page.locator(".readout")


def open_timeline(open_file: OpenFile, place: str = "timeline", **texts: Any) -> OpenedFile:
    page = open_file("gallery.js", gallery_data(**texts), place, **DESK)
    expect(stage(page)).to_be_visible()
    drawn(page)
    return page


def drawn(page: OpenedFile) -> None:
    """The picture of the view as it is now."""
    page.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def plot(page: OpenedFile) -> numpy.ndarray[Any, Any]:
    """The pixels of the plot without what is around it: height, width, RGB."""
    drawn(page)
    url = page.page.locator(".stage canvas").first.evaluate("canvas => canvas.toDataURL()")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    pixels = numpy.asarray(Image.alpha_composite(white, image).convert("RGB"))
    return pixels[TOP:-BOTTOM, LEFT:]


def place_of(page: OpenedFile, time_share: float, row: float, rows: int = 60) -> tuple[float, float]:
    """The pixel of the window where a share of the whole time and a row are."""
    box = stage(page).bounding_box()
    assert box
    x = box["x"] + LEFT + time_share * (box["width"] - LEFT)
    return x, box["y"] + TOP + (row + 0.5) / rows * (box["height"] - TOP - BOTTOM)


# What is packed.


def tables(**columns: Any) -> dict[str, Any]:
    """A timeline of two requests, with other columns where wanted."""
    made = {
        "requests": {"arrived": [0, 5], "ended": [9, 9], "replica": [0, 0], "class": [0, 0]},
        "intervals": {
            "request": [0, 0, 1],
            "phase": [0, 1, 2],
            "start": [0, 4, 5],
            "end": [4, 9, 9],
            "first": [0, 1, 2],
            "last": [0, 3, 3],
        },
        "steps": {"replica": [0, 0], "step": [0, 1], "start": [0, 4]},
        "marks": {"kind": [0], "time": [4], "until": [4], "request": [1], "replica": [0], "step": [1]},
        "lanes": {
            "lane": [0, 0],
            "step": [0, 1],
            "phase": [1, 2],
            "tokens": [0, 0],
            "most": [0, 0],
            "start": [0, 4],
            "end": [4, 9],
            "came": [0, 4],
        },
    }
    for path, values in columns.items():
        table, _, name = path.partition("__")
        made[table][name] = values
    return {"names": ["a", "b"], "classes": ["chat"], "end_ns": 9, "lane_names": ["stage 0"]} | made


def test_names_of_phases_and_marks_are_those_of_the_scripts() -> None:
    text = (STATIC / "phases.js").read_text()
    phases, marks = text.index("export const PHASES"), text.index("export const MARKS")
    places = [text.index(f'{{ name: "{name}"', phases, marks) for name in PHASES]
    places += [text.index(f'{{ name: "{name}"', marks) for name in MARKS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"intervals__request": [1, 0, 0]}, "intervals are not in order"),
        ({"intervals__start": [4, 0, 5]}, "intervals are not in order"),
        ({"steps__step": [1, 0]}, "steps are not in order"),
        ({"intervals__phase": [0, 1, 11]}, "intervals: phase must be from 0 to 10"),
        ({"requests__class": [0, 1]}, "requests: class must be from 0 to 0"),
        ({"marks__kind": [10]}, "marks: kind must be from 0 to 9"),
        ({"marks__request": [2]}, "marks: request must be from -1 to 1"),
        ({"intervals__request": [0, 0, 2]}, "intervals: request must be from 0 to 1"),
        ({"lanes__start": [4, 0]}, "lanes are not in order"),
        ({"lanes__lane": [0, 1]}, "lanes: lane must be from 0 to 0"),
        ({"lanes__phase": [2, 11]}, "lanes: phase must be from 0 to 10"),
    ],
)
def test_what_cannot_be_drawn_is_refused(columns: dict[str, Any], says: str) -> None:
    pack_timeline(**tables())
    with pytest.raises(ValueError) as caught:
        pack_timeline(**tables(**columns))
    assert str(caught.value) == says


def test_a_column_and_a_name_must_be_there() -> None:
    without = tables()
    del without["steps"]["start"]
    with pytest.raises(ValueError, match=r"^steps have no column start$"):
        pack_timeline(**without)
    with pytest.raises(ValueError, match=r"^1 names for 2 requests$"):
        pack_timeline(**tables() | {"names": ["a"]})


# What is drawn.


def test_it_looks_as_before(open_file: OpenFile) -> None:
    """To renew the picture, delete it and run this test."""
    page = open_timeline(open_file)
    pixels = plot(page)
    if not PICTURE.exists():
        Image.fromarray(pixels).save(PICTURE, optimize=True)
    expected = numpy.asarray(Image.open(PICTURE)).astype(int)
    assert expected.shape == pixels.shape
    differing = (numpy.abs(expected - pixels).max(axis=2) > 32).mean()
    assert differing <= 0.005


def test_many_requests_share_a_pixel(open_file: OpenFile) -> None:
    """A row of pixels for eight requests: each pixel has the colour of what most of them do, on the diagonal only."""
    many = timeline_data(num_requests=4000, num_steps=4000)
    page = open_timeline(open_file, timeline=many)
    pixels = plot(page)
    green = pixels[:, :, 1] > pixels[:, :, 0].astype(int) + 60
    height, width = green.shape
    assert green[10, : width // 4].any()
    assert not green[10, width // 2 :].any()
    assert not green[height - 10, : width // 2].any()
    page.page.mouse.move(*place_of(page, 0.05, 200, 4000))
    expect(readout(page)).to_contain_text(" requests here: ")


@pytest.mark.parametrize(("scheme", "green"), [("light", (0, 158, 115)), ("dark", (47, 191, 147))])
def test_its_colours_follow_the_theme(open_file: OpenFile, scheme: str, green: tuple[int, ...]) -> None:
    page = open_file("gallery.js", gallery_data(), "timeline", color_scheme=scheme, **DESK)
    expect(stage(page)).to_be_visible()
    assert (plot(page) == green).all(axis=2).mean() > 0.03
    page.page.get_by_label("Theme").select_option("Dark" if scheme == "light" else "Light")
    assert not (plot(page) == green).all(axis=2).any()


def test_legend_has_what_occurs(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    legend = page.page.get_by_role("list", name="Legend")
    expect(legend.get_by_role("listitem")).to_have_text(
        ["waiting", "prefill", "decode", "preempted", "recompute", "▼preempted", "✕worker lost", "?gap"]
    )


def lanes_of(page: OpenedFile) -> numpy.ndarray[Any, Any]:
    """The pixels of the lanes without their names: height, width, RGBA."""
    drawn(page)
    url = page.page.locator(".lanes canvas").evaluate("canvas => canvas.toDataURL()")
    return numpy.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA"))[:, LEFT:]


def test_lanes_are_in_line_with_the_requests(open_file: OpenFile) -> None:
    """A lane is 18 pixels high: steps, and below them a thin line of those that wait."""
    page = open_timeline(open_file, timeline=timeline_data(has_lanes=True))
    expect(page.page.get_by_role("img", name="Steps of stage 0, stage 1, group 0, group 1")).to_be_visible()
    whole = lanes_of(page)
    # Ten steps, each 14 of 380 units of time; group 0 has half of what group 1 has.
    shares = [(whole[18 * lane + 5, :, 3] > 0).mean() for lane in range(4)]
    assert shares == pytest.approx([10 * 14 / 380, 10 * 20 / 380, 5 * 14 / 380, 10 * 14 / 380], abs=0.03)
    waits = [(whole[18 * lane + 13, :, 3] > 0).mean() for lane in range(4)]
    assert waits == pytest.approx([0, 9 / 380, 0, 0], abs=0.02)
    # Zoomed with them, and with a line before each step.
    page.page.mouse.move(*place_of(page, 0, 0))
    page.page.keyboard.down("Shift")
    page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Shift")
    assert ((lanes_of(page)[5, :, 3] > 0).mean() - shares[0]) > 0.1


def test_lanes_are_named_with_what_they_do(open_file: OpenFile) -> None:
    page = open_timeline(open_file, timeline=timeline_data(has_lanes=True))
    expect(page.page.get_by_role("list", name="Legend")).to_contain_text("exchange")
    said = page.page.locator(".of-lanes")
    box = page.page.locator(".lanes").bounding_box()
    assert box

    def over(unit: float) -> None:
        page.page.mouse.move(box["x"] + LEFT + unit / 380 * (box["width"] - LEFT), box["y"] + 5)

    over(52)
    expect(page.page.locator(".lanes i")).to_be_visible()
    expect(said).to_contain_text(
        ": stage 0: step 2 for 140 ms; stage 1: step 1 for 190 ms; "
        "group 0: 50 tokens of step 2 for 140 ms; group 1: 100 tokens of step 2 for 140 ms"
    )
    over(54.5)
    expect(said).to_contain_text(
        "stage 0: nothing; stage 1: step 1 for 190 ms, step 2 waits for 20 ms; group 0: nothing"
    )
    over(55.5)
    expect(said).to_contain_text("stage 1: step 2 is on its way for 20 ms")
    # The same for the keyboard, whose cursor is in the requests.
    page.page.mouse.move(0, 0)
    stage(page).focus()
    page.press("ArrowRight")
    expect(said).to_contain_text("0:01.9")
    # A step of each stage at a time has no place on an axis of steps.
    page.page.get_by_label("Along").select_option("steps")
    expect(page.page.locator(".lanes")).to_have_count(0)
    page.press("ArrowLeft")
    expect(said).to_have_count(0)


# What its reader does.


def test_a_pointer_reads_and_selects(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    x, y = place_of(page, 0.005, 0)
    page.page.mouse.move(x, y)
    expect(readout(page)).to_have_text("request 0: waiting from 0:00.000 for 40 ms, steps 0 to 3, replica 0")
    page.page.mouse.move(x, y + 200)
    expect(readout(page)).to_contain_text(": nothing here")
    page.page.mouse.click(x, y)
    expect(page.page.locator("#selected-row")).to_have_text("request 0")
    page.page.mouse.click(x, y + 200)
    expect(page.page.locator("#selected-row")).to_have_text("request 0")
    stage(page).press("Escape")
    expect(page.page.locator("#selected-row")).to_have_text("none")


def test_a_wheel_zooms_around_the_pointer_to_one_step(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.get_by_label("Along").select_option("steps")
    drawn(page)
    x, y = place_of(page, 0.5, 34)
    page.page.mouse.move(x, y)
    before = readout(page).inner_text()
    for _ in range(30):
        page.page.mouse.wheel(0, -300)
    drawn(page)
    page.page.mouse.move(x + 1, y)
    assert readout(page).inner_text() == before
    # One step fills the width: a row is of one colour but for the border of the step, and nothing zooms further.
    pixels = plot(page)
    box = stage(page).bounding_box()
    assert box
    _, counts = numpy.unique(pixels[round(y - box["y"]) - TOP, 8:-8], axis=0, return_counts=True)
    assert counts.max() >= counts.sum() - 2
    page.page.mouse.wheel(0, -300)
    assert (plot(page) == pixels).all()
    page.page.get_by_role("button", name="Whole run").click()
    assert numpy.abs(plot(page).astype(int) - pixels).any()


def test_time_alone_and_rows_alone_are_zoomed(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.mouse.move(*place_of(page, 0.5, 30))
    page.page.keyboard.down("Shift")
    page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Shift")
    expect(page.page.locator("#zoom")).to_have_text("0:00.927 to 0:02.873")
    page.page.keyboard.down("Alt")
    page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Alt")
    page.page.mouse.wheel(200, 0)
    expect(page.page.locator("#zoom")).not_to_have_text("0:00.927 to 0:02.873")


def test_a_wheel_that_shift_turns_sideways_zooms_as_well(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.mouse.move(*place_of(page, 0.5, 30))
    page.page.keyboard.down("Shift")
    page.page.mouse.wheel(-300, 0)
    expect(page.page.locator("#zoom")).to_have_text("0:00.927 to 0:02.873")


def test_a_drag_moves_and_with_shift_marks_a_stretch(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    mouse, zoom = page.page.mouse, page.page.locator("#zoom")
    start, end = place_of(page, 0.25, 50), place_of(page, 0.5, 50)
    mouse.move(*start)
    page.page.keyboard.down("Shift")
    mouse.down()
    mouse.move(*end, steps=3)
    mouse.up()
    page.page.keyboard.up("Shift")
    expect(zoom).to_have_text("0:00.950 to 0:01.900")
    mouse.move(*end)
    mouse.down()
    mouse.move(*start, steps=3)
    mouse.up()
    expect(zoom).to_contain_text("0:01.18")
    # A drag is no click.
    expect(page.page.locator("#selected-row")).to_have_text("none")


def test_by_keyboard_alone(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.tab("Timeline").focus()
    for _ in range(12):
        page.press("Tab")
        if stage(page).evaluate("node => node === document.activeElement"):
            break
    expect(readout(page)).to_contain_text("0:01.900: nothing here")
    page.press("PageUp")
    for _ in range(3):
        page.press("Shift+ArrowLeft")
    page.press("Shift+ArrowLeft", "Shift+ArrowLeft", "ArrowRight")
    expect(readout(page)).to_have_text("request 0: waiting from 0:00.000 for 40 ms, steps 0 to 3, replica 0")
    page.press("+", "=", ".")
    expect(page.page.locator("#zoom")).to_contain_text("0:00.033 to 0:00.50")
    page.press("-", ",")
    page.press("ArrowDown", "ArrowUp", "Enter")
    expect(page.page.locator("#selected-row")).to_have_text("request 0")
    page.press("PageDown", "Home")
    expect(page.page.locator("#zoom")).to_contain_text("0:00.000 to 0:03.800")
    page.press("Escape", "q", "Control+0")
    expect(page.page.locator("#selected-row")).to_have_text("none")


@pytest.mark.parametrize(("order", "row"), [("arrival", 1), ("replica", 30), ("class", 40)])
def test_rows_are_ordered(open_file: OpenFile, order: str, row: int) -> None:
    """Where the second request is: it is the first on the second replica, and the first of the second class."""
    page = open_timeline(open_file)
    page.page.get_by_label("Order by").select_option(order)
    drawn(page)
    page.page.mouse.move(*place_of(page, 0.1, row))
    expect(readout(page)).to_contain_text("request 1: decode from ")


def test_requests_that_do_not_overlap_share_a_slot(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.get_by_label("Order by").select_option("slot")
    drawn(page)
    seen = set()
    for share in (0.01, 0.3, 0.5, 0.7, 0.9):
        page.page.mouse.move(*place_of(page, share, 0))
        seen.add(readout(page).inner_text().partition(":")[0])
    assert "request 0" in seen
    assert len({each for each in seen if each.startswith("request ")}) > 2


def test_a_slot_is_the_lowest_that_is_free(open_file: OpenFile) -> None:
    generator = numpy.random.default_rng(1)
    arrived = generator.integers(0, 900, 400)
    ended = arrived + generator.integers(0, 200, 400)
    busy_until: list[int] = []
    slots = [0] * 400
    for request in numpy.argsort(arrived, kind="stable"):
        is_free = [end <= arrived[request] for end in busy_until]
        slots[request] = is_free.index(True) if True in is_free else len(busy_until)
        busy_until[slots[request] : slots[request] + 1] = [int(ended[request])]
    page = open_file("slots.js", {"rows": 400, "arrived": arrived.tolist(), "ended": ended.tolist()})
    assert max(slots) > 20
    expect(page.page.locator("pre")).to_have_text(json.dumps(slots, separators=(",", ":")))


def test_a_place_is_shown_with_its_rows(open_file: OpenFile) -> None:
    """Requests 9 to 32 were there from 1.0 to 1.5 s."""
    page = open_timeline(open_file, "timeline?from=1000000000&to=1500000000")
    page.page.mouse.move(*place_of(page, 0.999, 24 - 9, 24))
    expect(readout(page)).to_contain_text("request 24: decode from 0:01.")
    expect(readout(page)).to_contain_text("; preempted")


def test_a_wheel_that_zooms_no_further_scrolls_the_page(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.mouse.move(*place_of(page, 0.5, 30))
    page.page.mouse.wheel(0, -100)
    drawn(page)
    page.page.mouse.wheel(0, 100)
    drawn(page)
    assert page.page.evaluate("scrollY") == 0
    page.page.mouse.wheel(0, 100)
    page.page.evaluate("new Promise((done) => (scrollY ? done() : addEventListener('scroll', done)))")


def test_rows_are_fitted_to_the_time(open_file: OpenFile) -> None:
    page = open_timeline(open_file)
    page.page.mouse.move(*place_of(page, 0.95, 0))
    page.page.keyboard.down("Shift")
    for _ in range(3):
        page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Shift")
    drawn(page)
    empty = plot(page)
    page.page.get_by_role("button", name="Fit rows").click()
    green = (0, 158, 115)
    assert (plot(page) == green).all(axis=2).mean() > 3 * (empty == green).all(axis=2).mean() > 0
    fitted = plot(page)
    stage(page).focus()
    page.press("f")
    assert (plot(page) == fitted).mean() > 0.99


def test_it_stays_where_it_is_when_the_run_goes_on(open_file: OpenFile) -> None:
    page = open_timeline(open_file, later=timeline_data(num_requests=80))
    more = page.page.get_by_role("button", name="More data")
    before = plot(page)
    more.click()
    drawn(page)
    assert (plot(page) != before).any()
    page = open_timeline(open_file, later=timeline_data())
    page.page.mouse.move(*place_of(page, 0.5, 30))
    page.page.mouse.wheel(0, -300)
    zoomed = plot(page)
    page.page.get_by_role("button", name="More data").click()
    assert (plot(page) == zoomed).all()


def test_nothing_to_draw(open_file: OpenFile) -> None:
    none = {
        "requests": dict.fromkeys(("arrived", "ended", "replica", "class"), ()),
        "intervals": dict.fromkeys(("request", "phase", "start", "end", "first", "last"), ()),
        "steps": dict.fromkeys(("replica", "step", "start"), ()),
        "marks": dict.fromkeys(("kind", "time", "until", "request", "replica", "step"), ()),
    }
    page = open_timeline(open_file, timeline=pack_timeline(**none, names=[], classes=[], end_ns=0))
    stage(page).focus()
    page.press("ArrowRight", "+", "Home", "Enter")
    page.page.mouse.move(*place_of(page, 0.5, 1))
    expect(readout(page)).to_contain_text("nothing here")


def test_nearly_all_functions_have_run(request: pytest.FixtureRequest) -> None:
    assert functions_run(request, lambda module: module.startswith(("timeline", "phases"))) >= 0.9
