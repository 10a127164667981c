"""The components in a browser: what their reader does and sees."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, expect

from eventlm.page.linker import STATIC
from tests.page.gallery import STEPS, gallery_data, timeline_data
from tests.page.opened_file import OpenedFile, functions_run

OpenFile = Callable[..., OpenedFile]
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
DESK = {"viewport": {"width": 1440, "height": 900}}
TABS = ("Cards", "Requests", "Charts", "Timeline")
#: Looks like HTML, a script, an escape, a template, a direction, an emoji, and a very long word.
HOSTILE = "<img src=x onerror=alert(1)></script><b>${1}{{x}}&lt;\u202e\u0000👩‍👩‍👧" + "w" * 300


def figure(page: OpenedFile, title: str) -> Locator:
    return page.page.get_by_role("figure", name=title)


def test_tabs_by_keyboard_alone(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data())
    expect(page.tab("Cards")).to_have_attribute("aria-selected", "true")
    page.tab("Cards").focus()
    for key, name in (
        ("ArrowRight", "Requests"),
        ("ArrowRight", "Charts"),
        ("ArrowLeft", "Requests"),
        ("Home", "Cards"),
        ("ArrowLeft", "Timeline"),
        ("ArrowRight", "Cards"),
        ("End", "Timeline"),
    ):
        page.press(key)
        expect(page.tab(name)).to_be_focused()
        expect(page.tab(name)).to_have_attribute("aria-selected", "true")
        expect(page.page.get_by_role("tabpanel")).to_have_count(1)
        expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    # From the tab, the next stop lies in its panel.
    page.press("Home", "Tab")
    expect(page.page.get_by_role("link", name="See it").first).to_be_focused()


def test_a_link_leads_to_a_place(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data())
    page.page.get_by_role("link", name="See it").first.click()
    expect(page.tab("Requests")).to_have_attribute("aria-selected", "true")
    expect(page.page.locator("#selected")).to_have_text("none 3")
    page.page.go_back()
    expect(page.tab("Cards")).to_have_attribute("aria-selected", "true")
    page.page.goto(f"{page.url}#%E0%A4%A?request=5")
    expect(page.tab("Cards")).to_have_attribute("aria-selected", "true")


def test_the_theme_is_kept(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.page.evaluate(background) == "rgb(25, 26, 27)"
    page.page.get_by_label("Theme").select_option("Light")
    assert page.page.evaluate(background) == "rgb(253, 253, 252)"
    page.page.reload()
    expect(page.page.get_by_label("Theme")).to_have_value("light")
    assert page.page.evaluate(background) == "rgb(253, 253, 252)"


def test_a_table_sorts(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "table")
    table = page.page.get_by_role("table", name="Requests")
    expect(table.locator("tbody tr")).to_have_count(50)

    def column(number: int) -> list[str]:
        return table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()

    assert column(1)[:3] == ["request 0", "request 1", "request 2"]
    page.page.get_by_role("button", name="Prompt").focus()
    page.press("Enter")
    prompts = [int(text.replace(",", "")) for text in column(3)]
    assert prompts == sorted(prompts, reverse=True)
    expect(table.get_by_role("columnheader", name="Prompt")).to_have_attribute("aria-sort", "descending")
    page.press("Enter")
    expect(table.get_by_role("columnheader", name="Prompt")).to_have_attribute("aria-sort", "ascending")
    prompts = [int(text.replace(",", "")) for text in column(3)]
    assert prompts == sorted(prompts)
    page.page.get_by_role("button", name="Show more").click()
    expect(table.locator("tbody tr")).to_have_count(120)
    for _ in range(2):  # what has no value is last either way
        page.page.get_by_role("button", name="First token").click()
        assert column(4)[-1] == "–"
    page.page.get_by_role("button", name="Request", exact=True).click()
    # By number within names.
    assert column(1)[8:12] == ["request 8", "request 9", "request 10", "request 11"]


def test_a_row_is_selected(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "table")
    page.page.get_by_role("button", name="request 4", exact=True).focus()
    page.press("Enter")
    expect(page.page.locator("#selected")).to_have_text("request 4")
    expect(page.page.get_by_role("button", name="request 4", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.page.get_by_text("None.")).to_be_visible()


def test_a_chart_by_keyboard(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts")
    chart = figure(page, "Requests")
    chart.get_by_role("application").focus()
    page.press("ArrowRight", "ArrowRight")
    expect(chart.get_by_role("status")).to_have_text("0:00.010: waiting 3, running 17")
    page.press("Shift+ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("0:00.210: waiting ")
    # The cursor of the other chart stands at the same time.
    expect(figure(page, "Free memory").locator(".at")).to_have_text("0:00.210")
    for _ in range(4):
        page.press("+")
    expect(page.page.locator("#range")).to_contain_text("0:00.197 to 0:01.")
    page.press("-")
    expect(page.page.locator("#range")).to_contain_text("0:00.184 to 0:02.")
    page.press("Home", "x")
    expect(page.page.locator("#range")).to_have_text("all")
    page.press("ArrowLeft")
    expect(chart.get_by_role("status")).to_contain_text("0:00.200: waiting ")


def test_a_series_is_hidden(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts")
    chart = figure(page, "Requests")
    key = chart.get_by_role("button", name="waiting")
    key.focus()
    page.press("Enter")
    expect(key).to_have_attribute("aria-pressed", "false")
    chart.get_by_role("application").focus()
    page.press("ArrowRight")
    expect(chart.get_by_role("status")).to_have_text("0:00.000: running 18")
    key.press("Enter")
    expect(key).to_have_attribute("aria-pressed", "true")


def test_a_chart_zooms_by_mouse(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts", **DESK)
    over = figure(page, "Requests").locator(".u-over")
    box = over.bounding_box()
    assert box
    page.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 30)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30, steps=4)
    page.page.mouse.up()
    first, last = page.page.locator("#range").inner_text().split(" to ")
    assert first.startswith(("0:04.9", "0:05.0"))
    assert last.startswith(("0:09.9", "0:10.0"))
    over.dblclick()
    expect(page.page.locator("#range")).to_have_text("all")
    page.page.set_viewport_size({"width": 700, "height": 900})
    width = figure(page, "Requests").evaluate("node => node.clientWidth")
    assert width < 700
    expect(figure(page, "Requests").locator(".uplot")).to_have_css("width", f"{width}px")


def test_a_chart_along_durations(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts")
    chart = figure(page, "Share")
    chart.get_by_role("application").focus()
    page.press("ArrowRight", "Shift+ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("200 ms: free ")


def test_a_chart_takes_other_values(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts", **DESK)
    chart = figure(page, "Requests")
    chart.locator(".u-over").evaluate("node => { globalThis.chartBefore = node; }")
    page.page.get_by_role("button", name="Less data").click()
    chart.get_by_role("application").focus()
    for _ in range(60):
        page.press("Shift+ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("0:09.990: waiting ")
    assert chart.locator(".u-over").evaluate("node => node === chartBefore")


def test_an_empty_chart_says_so(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts")
    expect(figure(page, "No steps")).to_contain_text("There is nothing to show.")


def test_a_part_that_fails_says_so(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(failing=True), "failing")
    expect(page.page.get_by_role("alert")).to_have_text("This part of the page failed: planned")
    page.tab("Cards").click()
    expect(page.page.get_by_text("Head of line")).to_be_visible()
    assert page.problems.pop().startswith("Error: planned")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_wrong_for_anybody(open_file: OpenFile, scheme: str) -> None:
    page = open_file("gallery.js", gallery_data(), color_scheme=scheme, **DESK)
    for name in TABS:
        page.tab(name).click()
        expect(page.page.get_by_text("Loading…")).to_have_count(0)
        assert page.serious_faults() == [], name


def test_all_fits_a_phone(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), **PHONE)
    for name in TABS:
        page.tab(name).click()
        expect(page.page.get_by_text("Loading…")).to_have_count(0)
        assert page.overflow() <= 0, name


def test_hostile_text_is_text(open_file: OpenFile) -> None:
    """In each place where a component shows a text of a trace."""
    rows = [{"name": HOSTILE, "kind": HOSTILE, "prompt": 1, "ttft": 1, "hits": 0}]
    card = {"title": HOSTILE, "verdict": HOSTILE, "text": HOSTILE}
    card["figures"] = [{"label": HOSTILE, "value": HOSTILE, "note": HOSTILE}]
    data = gallery_data(
        title=HOSTILE,
        details=[HOSTILE],
        notice=HOSTILE,
        cards=[card],
        rows=rows,
        seriesLabel=HOSTILE,
        markLabel=HOSTILE,
        tableTitle=HOSTILE,
        timeline=timeline_data(name=HOSTILE),
    )
    for window in (DESK, PHONE):
        page = open_file("gallery.js", data, **window)
        for name in ("cards", "table", "charts", "timeline"):
            page.page.goto(f"{page.url}#{name}")
            expect(page.page.get_by_text("Loading…")).to_have_count(0)
            if name == "timeline":
                page.page.get_by_label("Order by").select_option("class")
                page.page.get_by_role("application").focus()
                page.press(*["PageUp", "Shift+ArrowLeft"] * 8, "ArrowRight")
                expect(page.page.locator(".readout")).to_contain_text("waiting")
            shown = page.page.get_by_role("tabpanel").evaluate("node => node.textContent")
            assert HOSTILE in shown
            assert page.overflow() <= 0, name
        assert page.page.locator("img, #app script, #app b:not(.key b, .legend b)").count() == 0
        assert page.page.locator("h1").evaluate("node => node.textContent") == HOSTILE


def test_steps_are_counted(open_file: OpenFile) -> None:
    page = open_file("gallery.js", gallery_data(), "charts")
    chart = figure(page, "By step")
    chart.get_by_role("application").focus()
    for _ in range(STEPS // 20 + 1):
        page.press("Shift+ArrowRight")
    expect(chart.get_by_role("status")).to_contain_text("1,999: free 1,1")


def test_formats(open_file: OpenFile) -> None:
    numbers = {
        "formatNumber": [1234567, 0.256, None, 0],
        "formatShare": [0.1234, 1],
        "formatBytes": [0, 640, 1536, 5 * 2**40],
        "formatDuration": [0, 12, 1500, 999_600, 12_340_000, 999_800_000, 4_050_000_000, 125e9, 3600e9, 11_520e9, 2e14],
        "formatTime": [0, 5_250_000_000, 3_723_000_000_000, -1e9],
    }
    page = open_file("formats.js", numbers)
    shown = {row.split(": ")[0]: row.split(": ")[1].split(" | ") for row in page.page.locator("li").all_inner_texts()}
    assert shown["formatNumber"] == ["1,234,567", "0.26", "–", "0"]
    assert shown["formatShare"] == ["12.3%", "100%"]
    assert shown["formatBytes"] == ["0 B", "640 B", "1.5 KiB", "5 TiB"]
    assert shown["formatDuration"] == [
        *("0 s", "12 ns", "1.5 µs", "1 ms", "12.3 ms", "1 s", "4.05 s", "2 min 5 s", "1 h", "3 h 12 min", "2 d 8 h"),
    ]
    assert shown["formatTime"] == ["0:00.000", "0:05.250", "1:02:03.000", "−0:01.000"]


def test_nearly_all_functions_have_run(request: pytest.FixtureRequest) -> None:
    def is_chosen(module: str) -> bool:
        return (STATIC / module).is_file() and not module.startswith(("timeline", "phases"))

    assert functions_run(request, is_chosen) >= 0.9
