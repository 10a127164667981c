"""A page in one file, as its reader sees it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, Request, expect

from tests.processes import PATIENCE_SECONDS

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
#: How often each function of our own modules has run in all pages so far, by module, name and text.
RUNS: Counter[tuple[str, str, str]] = Counter()
MODULE = re.compile(r"^/\* (\S+) \*/$", re.M)

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


def serious_faults(page: Page) -> list[tuple[str, list[str]]]:
    """What axe holds against a page as it is, with the elements, where it is serious or worse."""
    page.evaluate(AXE.read_text())
    # It names every element that a rule allows too, unless it is told not to: half of its time.
    found: list[dict[str, Any]] = page.evaluate(
        "axe.run({resultTypes: ['violations']}).then((found) => found.violations)"
    )
    return [
        (each["id"], [node["html"][:120] for node in each["nodes"]])
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


class OpenedFile:
    """The file in a browser profile of its own. It loads nothing, logs no problem and breaks no policy."""

    def __init__(self, context: BrowserContext, url: str, place: str) -> None:
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.context = context
        self.url = url
        self.problems: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note_console)
        self.page.on("request", self._note_request)
        self._devtools = context.new_cdp_session(self.page)
        self._devtools.send("Profiler.enable")
        self._devtools.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
        self.page.goto(f"{url}#{place}")
        expect(self.page.locator("h1")).to_be_visible()

    def close(self) -> None:
        self._count_runs()
        self.context.close()
        assert self.problems == []

    def tab(self, name: str) -> Locator:
        return self.page.get_by_role("tab", name=name)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def serious_faults(self) -> list[tuple[str, list[str]]]:
        """What axe holds against the page as it is, with the elements, where it is serious or worse."""
        return serious_faults(self.page)

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return width

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.problems.append(request.url)

    def _count_runs(self) -> None:
        text: str = self.page.evaluate("[...document.scripts].at(-1).textContent")
        begins = {found.start(): found[1] for found in MODULE.finditer(text)}
        for script in self._devtools.send("Profiler.takePreciseCoverage")["result"]:
            if not script["url"].startswith("file:"):
                continue
            for function in script["functions"]:
                own = function["ranges"][0]
                begin = max((each for each in begins if each <= own["startOffset"]), default=None)
                # A module itself is a function too.
                if begin is not None and own["startOffset"] > text.index("=> {", begin):
                    # Where it stands differs with what else is linked.
                    key = (begins[begin], function["functionName"], text[own["startOffset"] : own["endOffset"]])
                    RUNS[key] += own["count"]


def functions_run(request: pytest.FixtureRequest, modules: Callable[[str], bool]) -> float:
    """The share of functions that have run of the chosen modules, once all other tests of the caller's file have run.

    Skips where some of them were not asked for.
    """
    here = request.node.module
    asked = {item.originalname for item in request.session.items if getattr(item, "module", None) is here}
    if {name for name in vars(here) if name.startswith("test_")} - asked:
        pytest.skip("the other tests of this file have not run")
    found = {key: count for key, count in RUNS.items() if modules(key[0])}
    print("never run:", sorted(key[:2] for key, count in found.items() if count == 0))
    return sum(count > 0 for count in found.values()) / len(found)
