"""Reports as their readers see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from eventlm.look.report.build import STATIC, make_report
from tests.look.planted import PLANTED, record_sets
from tests.look.report.runs import GOLDEN, HOSTILE, record_with_gap, write_empty, write_hostile
from tests.page.opened_file import OpenedFile, functions_run

OpenPage = Callable[..., OpenedFile]
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
DESK = {"viewport": {"width": 1440, "height": 900}}
TABS = ("Findings", "Overview", "Timeline", "Over time", "Replicas", "Requests")
#: The planted causes that are looked for whenever tests run; tests/look/findings finds all of them, without a browser.
SHOWN = ("starving_key", "stalling_batcher")
ALL_TABS = (*TABS, "What if", "Two runs")


def show(page: OpenedFile, name: str) -> None:
    page.tab(name).click()
    expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    expect(page.page.get_by_text("Loading…")).to_have_count(0)


def write(path: Path, html: str) -> Path:
    path.write_text(html)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.soak) for name in PLANTED]
)
def test_a_new_user_finds_the_cause(planted_report: Callable[[str], Path], open_page: OpenPage, name: str) -> None:
    """The first finding names the culprit, and a click leads to a request that suffered from it."""
    page = open_page(planted_report(name), **DESK)
    first = page.page.get_by_role("tabpanel", name="Findings").locator("section").first
    expect(first.locator(".culprit")).to_contain_text(PLANTED[name].culprit)
    expect(first.locator(".verdict")).to_be_visible()
    link = first.get_by_role("link", name="Request").first
    request = link.inner_text().split()[1]
    link.click()
    expect(page.tab("Timeline")).to_have_attribute("aria-selected", "true")
    expect(page.page.locator(".readout")).to_contain_text(f"{request}: ")
    story = page.page.get_by_role("region", name=f"Request {request}", exact=True)
    expect(story.locator(".story")).to_contain_text(f"equest {request}")
    expect(story.get_by_role("table", name=f"Phases of request {request}")).to_be_visible()
    page.page.go_back()
    expect(page.tab("Findings")).to_have_attribute("aria-selected", "true")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.soak)])
def test_nothing_serious_is_wrong_for_anybody(full_report: Path, open_page: OpenPage, scheme: str) -> None:
    page = open_page(full_report, color_scheme=scheme, **DESK)
    for name in ALL_TABS:
        show(page, name)
        assert page.serious_faults() == [], name
        assert page.overflow() <= 0, name


@pytest.mark.parametrize("settings", [DESK, PHONE | {"color_scheme": "dark"}])
def test_stages_and_kv_groups_are_shown(ranks_report: Path, open_page: OpenPage, settings: dict[str, object]) -> None:
    page = open_page(ranks_report, **settings)
    expect(page.page.locator("header").first).to_contain_text("3 stages of 3 KV groups")
    expect(page.page.get_by_text("rank 0 of replica 1")).to_be_visible()
    show(page, "Timeline")
    lanes = page.page.get_by_role("img", name="Steps of 0: stage 0, 0: stage 1")
    expect(lanes).to_be_visible()
    page.page.get_by_role("application", name="Timeline of requests").focus()
    page.press("ArrowRight")
    expect(page.page.locator(".of-lanes")).to_contain_text("2: group 2: ")
    assert page.serious_faults() == []
    assert page.overflow() <= 0
    show(page, "Replicas")
    expect(page.page.get_by_role("table", name="Stages").locator("tbody tr")).to_have_count(9)
    expect(page.page.get_by_role("table", name="KV groups").locator("tbody tr")).to_have_count(9)
    assert page.serious_faults() == []
    assert page.overflow() <= 0


def test_all_fits_a_phone(full_report: Path, open_page: OpenPage) -> None:
    page = open_page(full_report, **PHONE)
    for name in ALL_TABS:
        show(page, name)
        assert page.overflow() <= 0, name


def test_by_keyboard_alone(full_report: Path, open_page: OpenPage) -> None:
    page = open_page(full_report, **DESK)
    page.tab("Findings").focus()
    for name in ALL_TABS[1:]:
        page.press("ArrowRight")
        expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    for name in ("What if", "Requests"):
        page.press("ArrowLeft")
        expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    expect(page.tab("Requests")).to_be_focused()
    row = page.page.get_by_role("table", name="The worst requests").locator("tbody th button").first
    row.focus()
    name = row.inner_text()
    page.press("Enter")
    story = page.page.get_by_role("region", name=f"Request {name}", exact=True)
    expect(story.locator(".story")).to_be_visible()
    # On to one that shared its steps, and from there to the timeline.
    other = story.get_by_role("table", name="Who shared steps").locator("tbody button").first
    other.focus()
    name = other.inner_text()
    page.press("Enter")
    expect(page.page.get_by_role("region", name=f"Request {name}", exact=True)).to_be_visible()
    page.tab("Requests").focus()
    for name in ("Replicas", "Over time", "Timeline"):
        page.press("ArrowLeft")
        expect(page.page.get_by_role("tabpanel", name=name)).to_be_visible()
    page.page.get_by_role("application", name="Timeline of requests").focus()
    page.press("PageUp", "Home", "Enter")
    expect(page.page.locator(".readout")).not_to_be_empty()


def test_cursors_of_charts_move_together(full_report: Path, open_page: OpenPage) -> None:
    page = open_page(full_report, "time", **DESK)
    page.page.get_by_role("figure", name="Sequences", exact=True).get_by_role("application").focus()
    page.press("Shift+ArrowRight", "Shift+ArrowRight")
    times = page.page.locator(".legend .at")
    expect(times.first).not_to_be_empty()
    expect(times.nth(1)).to_have_text(times.first.inner_text())


def test_measures_have_one_name(full_report: Path, open_page: OpenPage) -> None:
    page = open_page(full_report, "what-if", **DESK)
    expect(page.page.get_by_role("table", name="Metrics of the recorded run")).to_contain_text("First token (TTFT) p50")


def test_the_largest_changes_by_each_latency(full_report: Path, open_page: OpenPage) -> None:
    page = open_page(full_report, "two-runs", **DESK)
    table = page.page.get_by_role("table", name="The requests that changed most")
    expect(table).to_contain_text("+")
    first = table.locator("tbody tr").first.inner_text()
    page.page.get_by_label("Latency").select_option("In the queue")
    expect(table.locator("tbody tr").first).not_to_have_text(first)
    button = table.locator("tbody button").first
    name = button.inner_text()
    button.click()
    expect(page.page.get_by_role("region", name=f"Request {name}", exact=True)).to_be_visible()


def test_hostile_texts_are_shown_as_text(tmp_path: Path, open_page: OpenPage) -> None:
    run = write_hostile(tmp_path / "hostile.jsonl")
    path = write(tmp_path / "hostile.html", make_report(str(run), verify=False).html)
    page = open_page(path, **DESK)
    for name in TABS:
        show(page, name)
        assert page.overflow() <= 0, name
        assert page.page.evaluate("document.querySelectorAll('img, iframe, #app script, svg[onload]').length") == 0
    shown = page.page.get_by_role("tabpanel", name="Overview", include_hidden=True).evaluate("node => node.textContent")
    assert [text for text in HOSTILE if text not in shown] == []
    page.page.get_by_role("tab", name="Requests").click()
    page.page.get_by_role("table", name="The worst requests").locator("tbody th button").first.click()
    assert page.page.get_by_role("region", name="Request ").count() >= 1


@pytest.mark.parametrize("kind", ["empty", "unverified", "gap", "damaged", "cut"])
def test_runs_that_lack_something(
    tmp_path: Path, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = tmp_path / "run.jsonl"
    lines = GOLDEN.read_bytes().splitlines(keepends=True)
    if kind == "empty":
        write_empty(run)
    elif kind == "gap":
        run = record_with_gap(tmp_path, 1, monkeypatch)
    elif kind == "damaged":
        run.write_bytes(b"".join([*lines[:60], b"{}\n", *lines[61:]]))
    else:
        # Nobody has come to its end in the cut one.
        run.write_bytes(b"".join(lines if kind == "unverified" else lines[:12]))
    html = make_report(str(run), verify=kind != "unverified", partial=kind == "damaged").html
    page = open_page(write(tmp_path / "run.html", html), **DESK)
    for name in TABS:
        show(page, name)
    expected = {
        "empty": "No request arrived.",
        "unverified": "--no-verify",
        "gap": "were not recorded",
        "damaged": "damaged at line 61",
        "cut": "no clean end",
    }[kind]
    expect(page.page.locator(".notice").filter(has_text=expected)).to_be_visible()


def test_several_replicasets_are_told_apart(tmp_path: Path, open_page: OpenPage) -> None:
    html = make_report(str(record_sets(tmp_path, max_num_seqs=2))).html
    page = open_page(write(tmp_path / "sets.html", html), **DESK)
    expect(page.page.get_by_role("heading", name="ma, mb, run")).to_be_visible()
    expect(page.page.get_by_role("heading", name="b (mb): More work arrives")).to_be_visible()
    show(page, "Overview")
    limits = page.page.get_by_role("table", name="Plug-ins and limits")
    for section, value in (("a: core", "64"), ("b: core", "2")):
        expect(limits.get_by_role("row", name=f"{section} max_num_seqs {value}", exact=True)).to_be_visible()
    show(page, "Replicas")
    rows = page.page.get_by_role("table", name="Replicas").get_by_role("row")
    expect(rows).to_contain_text(["Model", "ma", "mb"])
    assert page.serious_faults() == []


def test_nearly_all_functions_have_run(request: pytest.FixtureRequest) -> None:
    assert functions_run(request, lambda module: (STATIC / module).is_file()) >= 0.9
