"""`eventlm view` as people use it: a real process, a real browser, the debugger beside the report."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.opened_file import serious_faults
from tests.processes import PATIENCE_SECONDS
from tests.replay.golden import FOLDER


class Viewed:
    """A process that shows a trace."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eventlm", "view", "--no-open", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http\S+", self.process.stdout.readline())
        assert found is not None
        self.address = found[0]

    def end(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def viewed() -> Iterator[Viewed]:
    viewed = Viewed(str(FOLDER / "edf_tight.jsonl"))
    yield viewed
    assert viewed.end() == 0


def _open(browser: Browser, address: str, *, width: int = 1440, scheme: str = "light") -> tuple[Page, list[str]]:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(address)
    return page, problems


def _run(page: Page, command: str) -> None:
    page.get_by_label("Command").fill(command)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()


def test_the_debugger_goes_through_the_run(browser: Browser, viewed: Viewed) -> None:
    page, problems = _open(browser, viewed.address)
    # The token is not left in the address.
    expect(page.get_by_role("tab", name="Findings")).to_be_visible()
    assert "token" not in page.url
    page.get_by_role("tab", name="Findings").focus()
    page.keyboard.press("End")
    expect(page.get_by_role("tab", name="Debugger")).to_have_attribute("aria-selected", "true")
    log = page.get_by_role("log")
    _run(page, "goto 50")
    expect(log).to_contain_text("event 50 at")
    page.get_by_role("button", name="next drain").click()
    page.get_by_role("button", name="queue", exact=True).click()
    expect(log).to_contain_text("waiting at event")
    _run(page, "find free <")
    expect(log.locator(".debugger-error")).to_contain_text("column")
    _run(page, "why <img src=x onerror=alert(1)>")
    expect(log.locator("img")).to_have_count(0)
    page.get_by_label("Command").press("ArrowUp")
    expect(page.get_by_label("Command")).to_have_value("why <img src=x onerror=alert(1)>")
    # The token survives a reload.
    page.reload()
    expect(page.get_by_role("tab", name="Debugger")).to_be_visible()
    page.get_by_role("button", name="Play").click()
    page.get_by_role("tab", name="Debugger").click()
    expect(page.get_by_role("log")).to_contain_text("goto end")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    assert problems == []
    page.context.close()


def test_the_debugger_says_where_it_is_and_takes_commands_of_findings(browser: Browser, viewed: Viewed) -> None:
    page, problems = _open(browser, viewed.address)
    page.get_by_role("tab", name="Debugger").click()
    expect(page.get_by_role("log")).to_contain_text("event 0 at")
    # Commands that come while another one runs wait for it.
    page.get_by_label("Command").fill("goto 50")
    page.evaluate("""() => {
        const form = document.querySelector(".debugger-line");
        form.requestSubmit();
    }""")
    _run(page, "help")
    expect(page.get_by_role("log").locator(".prose")).to_have_count(1)
    page.context.close()
    dying = Viewed(str(FOLDER / "lrs_dying_workers.jsonl"))
    try:
        page, more_problems = _open(browser, dying.address)
        page.get_by_role("button", name="In the debugger").first.click()
        log = page.get_by_role("log")
        expect(log).to_contain_text("> goto ")
        expect(log).to_contain_text("worker_lost")
        expect(log.locator(".debugger-error")).to_have_count(0)
        page.context.close()
    finally:
        assert dying.end() == 0
    assert problems + more_problems == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_nothing_serious_is_wrong_for_anybody(browser: Browser, viewed: Viewed, scheme: str, width: int) -> None:
    page, problems = _open(browser, viewed.address, width=width, scheme=scheme)
    page.get_by_role("tab", name="Debugger").click()
    _run(page, "show running")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert serious_faults(page) == []
    assert problems == []
    page.context.close()


def test_without_the_token_there_is_no_run(browser: Browser, viewed: Viewed) -> None:
    page, _ = _open(browser, viewed.address.split("#")[0])
    expect(page.get_by_role("alert")).to_contain_text("The token is missing or wrong")
    page.context.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.jsonl"], "nosuch.jsonl"),
        (["--speed", "-1"], "--speed"),
        (["--port", "99999"], "--port 99999"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eventlm", "view", "--no-open", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "eventlm", "view", "--no-open", str(FOLDER / "edf_tight.jsonl")]
        done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2
    assert done.stderr.startswith(f"eventlm: error: --port {port}: ")
