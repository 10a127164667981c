"""The dashboard in a browser: what its reader does and sees, and that the page does no more than it should."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from playwright.sync_api import expect

from eventlm.bus.log_reader import LogReader
from eventlm.engine.admin import ReplicaStatus
from eventlm.engine.oldest_requests import ListedSequence, Wait
from eventlm.engine.reports import NoReportError
from eventlm.engine.request import EngineUnavailableError
from eventlm.events import BackendDown, BackendState
from eventlm.metrics.aggregates import ClassMetrics, MetricsSnapshot
from tests.metrics.test_forwarded import Measured
from tests.processes import wait_until
from tests.replay.index.runs import record_ranks
from tests.server.auth.test_api_keys import TWO_KEYS, write
from tests.server.conftest import RunningServer
from tests.server.dashboard.opened_dashboard import RUNS, OpenedDashboard
from tests.server.dashboard.test_endpoints import LISTED, num_watchers, quicken
from tests.server.dashboard.test_endpoints_served import SLOW, load
from tests.server.endpoints.test_metrics import feed
from tests.serving import Server, serve

pytestmark = pytest.mark.long

OpenDashboard = Callable[..., OpenedDashboard]
WIDE: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
SETTINGS = [WIDE, pytest.param(PHONE | {"color_scheme": "dark"}, marks=pytest.mark.soak)]
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>document.title='owned'</script>",
    "<b onmouseover=alert(1)>gold</b>",
    "javascript:alert(1)",
    "${7*7}{{7*7}}",
    "&lt;i&gt;&amp;",
    "\u202egold\u202c",
    "a\u0000b\u2028c",
    "w" * 200,
    "'\"`;--",
]
BUSY = Wait(cause="backend_limit", replica=1, num_lacking=0, other=None)
REPLICA = ReplicaStatus(
    replica=0,
    up=True,
    epoch=1,
    num_running=1,
    num_steps_in_flight=1,
    num_blocks=9,
    num_held_blocks=3,
    num_cached_blocks=5,
)


@pytest.fixture
def fed(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server whose engine has lived through a golden trace of two replicas, with quick frames."""
    feed(guarded)
    quicken(guarded, 0.05)
    store, counts = guarded.engine.store, itertools.count()
    take = store.snapshot

    def snapshot() -> MetricsSnapshot:
        return structs.replace(take(), classes={HOSTILE[0]: ClassMetrics(num_requests=next(counts))})

    monkeypatch.setattr(store, "snapshot", snapshot)
    guarded.engine.waiting = [LISTED]
    guarded.engine.running = [structs.replace(LISTED, request=4, state="running", replica=1, wait=None)]
    guarded.engine.replicas = [REPLICA, structs.replace(REPLICA, replica=1)]
    return guarded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server that is busy."""
    folder = tmp_path_factory.mktemp("server")
    write(folder / "keys.toml", TWO_KEYS.replace("requests_per_minute = 60, tokens_per_minute = 1_000", ""))
    with serve(folder, *SLOW) as server, load(server):
        yield server


def test_a_busy_server_is_seen(loaded: Server, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(loaded.url, **WIDE).enter()
    expect(page.figure("Running")).to_have_text("2")
    expect(page.figure("Waiting")).to_have_text("6")
    expect(page.page.locator(".verdict")).to_have_text("ready")
    # The second frame has rates.
    expect(page.figure("Tokens per second")).not_to_have_text("–")
    expect(page.page.locator(".chart canvas")).to_have_count(12)
    expect(page.page.get_by_text("all sequence slots of replica 0 are taken").first).to_be_visible()
    page.tab("Requests").click()
    expect(page.table("Requests that wait").get_by_role("row")).to_have_count(7)
    expect(page.table("Requests that run").get_by_role("row")).to_have_count(3)
    page.tab("Replicas").click()
    expect(page.table("Replicas").get_by_role("row").nth(1)).to_contain_text("up")
    kept = page.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert "sk-ops" not in kept


def test_charts_go_on_while_one_points_at_them(loaded: Server, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(loaded.url, **WIDE).enter()
    plot = page.page.locator(".plot").first
    # With the second frame it is a line and no longer a point.
    expect(page.figure("Tokens per second")).not_to_have_text("–")
    plot.evaluate("node => node.firstChild.marked = true")
    for _ in range(2):
        shown = page.figure("Tokens per second").text_content()
        expect(page.figure("Tokens per second")).not_to_have_text(str(shown))
    # The same chart as before, with more in it.
    assert plot.evaluate("node => node.firstChild.marked") is True
    plot.focus()
    for key in ("+", "ArrowRight", "Home"):
        page.page.keyboard.press(key)
    expect(page.page.get_by_role("status").filter(has_text="Generated")).to_have_count(1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_stages_and_kv_groups_are_shown(
    guarded: RunningServer, open_dashboard: OpenDashboard, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Of three replicas of three stages of three KV groups."""
    with LogReader(record_ranks(tmp_path)) as reader:
        for line in reader:
            guarded.engine.store.apply(line.event())
    page = open_dashboard(guarded.url, **settings).enter()
    page.tab("Replicas").click()
    expect(page.table("Replicas").get_by_role("row").nth(1)).to_contain_text("3 stages of 3 KV groups")
    for name in ("Stages", "KV groups"):
        expect(page.table(name).get_by_role("row")).to_have_count(10)
    assert page.serious_faults() == []
    assert page.overflow() <= 0


@pytest.fixture
def gateway(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server of four backends and a free place: one is up, one busy, one drained, and one failed too often."""
    quicken(guarded, 0.05)
    rig = Measured(5, limit=4)
    names = [HOSTILE[0], "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000"]
    for replica, name in enumerate(names):
        rig.feed(structs.replace(rig.up(replica, epoch=2, limit=4), name=name, kind="vllm"))
    rig.feed(BackendDown(replica=4, epoch=1, reason="removed"))
    rig.feed(BackendState(replica=1, epoch=2, running=7, waiting=3, kv_used_ppm=625_000))
    at_first = rig.store.snapshot()
    requests = [rig.arrive() for _ in range(8)]
    for request, kind in zip(requests, ("connect", "server", "connect"), strict=False):
        rig.fail(request, kind)
    rig.feed(BackendDown(replica=2, epoch=2, reason="drained"))
    rig.feed(BackendDown(replica=3, epoch=2, reason="3 failures in a row, the last: connect"))
    for request in requests[3:]:
        rig.stream(request)
        rig.end(request)
    guarded.engine.waiting = [structs.replace(LISTED, wait=BUSY)]
    guarded.engine.running = [structs.replace(LISTED, request=4, state="running", replica=1, wait=None)]
    snapshots = itertools.chain([at_first], itertools.repeat(rig.store.snapshot()))
    monkeypatch.setattr(guarded.engine.store, "snapshot", lambda: next(snapshots))
    return guarded


@pytest.mark.parametrize("settings", SETTINGS)
def test_backends_are_shown(gateway: RunningServer, open_dashboard: OpenDashboard, settings: dict[str, Any]) -> None:
    page = open_dashboard(gateway.url, **settings).enter()
    expect(page.page.locator(".verdict")).to_have_text("1 of 3 backends down")
    expect(page.page.get_by_text("backend 10.0.0.2:8000 has as many requests as it may have").first).to_be_visible()
    expect(page.figure("Attempts failed")).to_have_text("3")
    # Nothing of steps and blocks.
    expect(page.page.locator(".chart canvas")).to_have_count(8)
    page.tab("Replicas").click()
    rows = page.table("Backends").get_by_role("row")
    # The free place is none of them.
    expect(rows).to_have_count(5)
    for number, words in enumerate((HOSTILE[0], "10.0.0.2:8000", "drained", "down: 3 failures in a row"), start=1):
        expect(rows.nth(number)).to_contain_text(words)
    expect(rows.nth(2)).to_contain_text("62.5%")
    expect(rows.nth(1)).to_contain_text("connect 1")
    expect(page.table("Replicas")).to_have_count(0)
    assert page.page.locator("main img").count() == 0
    assert page.serious_faults() == []
    assert page.overflow() <= 0
    page.tab("Requests").click()
    expect(page.table("Requests that run").get_by_role("row").nth(1)).to_contain_text("10.0.0.2:8000")


def test_one_process_has_neither_ranks_nor_stages(fed: RunningServer, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(fed.url, **WIDE).enter()
    page.tab("Replicas").click()
    expect(page.table("Replicas").get_by_role("columnheader").nth(1)).to_have_text("State")
    for name in ("Stages", "KV groups"):
        expect(page.table(name)).to_have_count(0)


def test_by_keyboard_alone(fed: RunningServer, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(fed.url, **WIDE)
    keyboard = page.page.keyboard
    keyboard.press("Tab")
    keyboard.type("sk-ops")
    keyboard.press("Enter")
    expect(page.tab("Overview")).to_be_visible()
    while page.page.evaluate("document.activeElement.getAttribute('role')") != "tab":
        keyboard.press("Tab")
    for name in ("Requests", "Replicas", "Classes", "Overview"):
        keyboard.press("ArrowRight")
        expect(page.tab(name)).to_be_focused()
        expect(page.tab(name)).to_have_attribute("aria-selected", "true")
    while page.page.evaluate("document.activeElement.textContent") != "Forget the key":
        keyboard.press("Shift+Tab")
    keyboard.press("Enter")
    expect(page.key).to_be_visible()
    wait_until(lambda: num_watchers(fed) == 0)


@pytest.mark.parametrize("key", ["sk-no", "sk-alice"])
def test_a_key_that_may_not_look(fed: RunningServer, open_dashboard: OpenDashboard, key: str) -> None:
    page = open_dashboard(fed.url).enter(key)
    expect(page.error).to_contain_text("Incorrect API key" if key == "sk-no" else "scope 'admin'")
    page.enter()
    expect(page.tab("Overview")).to_be_visible()


def test_without_keys_it_says_how_to_set_one_up(server: RunningServer, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(server.url).enter("any")
    expect(page.error).to_contain_text("--api-keys-file FILE")


def test_a_reload_forgets_the_key(fed: RunningServer, open_dashboard: OpenDashboard) -> None:
    page = open_dashboard(fed.url).enter()
    expect(page.tab("Overview")).to_be_visible()
    page.page.reload()
    expect(page.key).to_have_value("")
    wait_until(lambda: num_watchers(fed) == 0)


def test_hostile_text_is_text(fed: RunningServer, open_dashboard: OpenDashboard) -> None:
    classes = enumerate(HOSTILE)
    fed.engine.waiting = [structs.replace(LISTED, request=number, service_class=text) for number, text in classes]
    fed.engine.report_error = NoReportError("not_recorded", HOSTILE[0])
    page = open_dashboard(fed.url, **PHONE).enter()
    page.tab("Requests").click()
    table = page.table("Requests that wait")
    expect(table.get_by_role("row")).to_have_count(len(HOSTILE) + 1)
    assert [cell.strip() for cell in table.locator("td:nth-child(4)").all_text_contents()] == HOSTILE
    page.button("Download a report").click()
    expect(page.notices).to_contain_text(HOSTILE[0])
    page.tab("Classes").click()
    expect(page.table("Service classes").get_by_role("row").nth(1)).to_contain_text(HOSTILE[0])
    assert page.page.locator("img, b[onmouseover], main script").count() == 0
    assert page.page.title() == "eventlm dashboard"
    assert page.overflow() == 0


CAUSES: dict[Any, str] = {
    "steps_in_flight": "no step has been planned on replica 1",
    "batcher": "the batcher gave",
    "token_budget": "more urgent ones",
    "micro_batch": "its share of more urgent ones",
    "head_of_line": "request 4 goes first and does not fit",
    "trial": "request 4 is tried alone",
    "blocks": "replica 1 has 3 blocks too few",
    "sequence_limit": "all sequence slots of replica 1",
    "avoided": "just failed on backend 1",
    "backend_limit": "backend 1 has as many requests as it may have",
    "worker": "no worker is up",
    "backend": "no backend is up",
    "backoff": "the next one is due in 1.5 s",
    "paused": "an operator",
    "draining": "still in flight",
    "grammar": "its grammar",
    "text_end": "the end of its text",
}


def test_every_cause_is_put_into_words(fed: RunningServer, open_dashboard: OpenDashboard) -> None:
    def listed(number: int, cause: Any) -> ListedSequence:
        wait = Wait(cause=cause, replica=1, num_lacking=3, other=(4, 0), remaining_ns=1_500_000_000)
        return structs.replace(LISTED, request=number, index=number % 2, wait=wait)

    fed.engine.waiting = [listed(number, cause) for number, cause in enumerate(CAUSES)]
    fed.engine.waiting = fed.engine.waiting[1:] + fed.engine.waiting[:1]
    page = open_dashboard(fed.url, **WIDE).enter()
    expect(page.page.get_by_text("Request 1.1 has waited longest")).to_be_visible()
    page.tab("Requests").click()
    for number, words in enumerate(CAUSES.values()):
        name = f"{number}.1" if number % 2 else str(number)
        row = page.table("Requests that wait").locator("tr", has=page.page.locator(f"th:text-is('{name}')"))
        expect(row).to_contain_text(words)


def test_a_report_is_saved(fed: RunningServer, open_dashboard: OpenDashboard, tmp_path: Path) -> None:
    page = open_dashboard(fed.url, accept_downloads=True).enter()
    page.page.get_by_label("Report of the last").select_option("15")
    with page.page.expect_download() as waiting:
        page.button("Download a report").click()
    download = waiting.value
    assert download.suggested_filename == "eventlm-report.html"
    download.save_as(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "<p>900 s</p>"
    fed.engine.report_error = NoReportError("busy", "another report is being made")
    page.button("Download a report").click()
    expect(page.notices).to_have_text("There is no report: Another report is being made.")


def test_trouble_is_told_and_gets_over(
    fed: RunningServer, open_dashboard: OpenDashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_dashboard(fed.url).enter()
    expect(page.page.locator(".chart canvas").first).to_be_visible()

    async def read_metrics() -> None:
        raise EngineUnavailableError("the engine's process has died")

    with monkeypatch.context() as patch:
        patch.setattr(fed.engine, "read_metrics", read_metrics)
        expect(page.notices).to_have_text("The engine's process has died.")
    expect(page.notices).to_have_count(0)
    fed.engine.state = "draining"
    expect(page.page.locator(".verdict")).to_have_text("draining")


@pytest.mark.parametrize(("scheme", "window"), [("light", WIDE), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_nothing_serious_is_wrong_for_anybody(
    fed: RunningServer, open_dashboard: OpenDashboard, scheme: str, window: dict[str, Any]
) -> None:
    page = open_dashboard(fed.url, color_scheme=scheme, **window)
    assert page.serious_faults() == []
    page.enter()
    expect(page.page.locator(".chart canvas").first).to_be_visible()
    for name in ("Overview", "Requests", "Replicas", "Classes"):
        page.tab(name).click()
        expect(page.page.locator(".panel:not([hidden]) .card").first).to_be_visible()
        assert page.overflow() == 0, name
        # The others are tables too.
        if name in ("Overview", "Requests"):
            assert page.serious_faults() == [], name


def test_most_of_its_functions_have_run() -> None:
    """In the tests before this one."""
    if not RUNS:
        pytest.skip("no page was opened")
    never = sorted(function for function, count in RUNS.items() if not count)
    assert len(never) <= len(RUNS) / 10, never
