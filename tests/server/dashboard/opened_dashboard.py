"""The dashboard as its reader sees it."""

from __future__ import annotations

import re
from collections import Counter
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Locator, Page, Request, expect

from eventlm.server.dashboard.page import STATIC
from tests.page.opened_file import serious_faults
from tests.processes import PATIENCE_SECONDS

#: How often each function of the dashboard's own modules has run in all pages so far, by module, name and place in it.
RUNS: Counter[tuple[str, str, int]] = Counter()
MODULE = re.compile(r"^/\* (\S+) \*/$", re.M)

expect.set_options(timeout=PATIENCE_SECONDS * 1000)


class OpenedDashboard:
    """The page in a browser profile of its own. It breaks no policy, and asks no other server for anything."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        context.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.context = context
        self.problems: list[str] = []
        self.host = urlsplit(url).netloc
        self.page: Page = context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note_console)
        self.page.on("request", self._note_request)
        self._devtools = context.new_cdp_session(self.page)
        self._devtools.send("Profiler.enable")
        self._devtools.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
        self.page.goto(f"{url}/dashboard")
        expect(self.key).to_be_visible()

    @property
    def key(self) -> Locator:
        return self.page.get_by_label("API key with the scope admin")

    @property
    def error(self) -> Locator:
        return self.page.get_by_role("alert")

    @property
    def notices(self) -> Locator:
        return self.page.locator(".notice")

    def enter(self, key: str = "sk-ops") -> OpenedDashboard:
        """Give a key."""
        self.key.fill(key)
        self.key.press("Enter")
        return self

    def tab(self, name: str) -> Locator:
        return self.page.get_by_role("tab", name=name)

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def figure(self, label: str) -> Locator:
        """The number beside a name."""
        return self.page.locator(".figures > div", has_text=label).locator("dd").first

    def table(self, name: str) -> Locator:
        return self.page.locator(".table").and_(self.page.get_by_role("region", name=name))

    def serious_faults(self) -> list[tuple[str, list[str]]]:
        """What axe holds against the page as it is, with the elements, where it is serious or worse."""
        self._devtools.send("Page.setBypassCSP", {"enabled": True})
        return serious_faults(self.page)

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return width

    def close(self) -> None:
        self._count_runs()
        self.context.close()
        assert self.problems == []

    def _note_console(self, message: ConsoleMessage) -> None:
        # The browser itself writes a line for every error of the server.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.problems.append(message.text)

    def _note_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.netloc != self.host and address.scheme != "blob":
            self.problems.append(request.url)

    def _count_runs(self) -> None:
        for script in self._devtools.send("Profiler.takePreciseCoverage")["result"]:
            if not script["url"].endswith("/dashboard/page.js"):
                continue
            text: str = self.page.request.get(script["url"]).text()
            begins = {found.start(): found[1] for found in MODULE.finditer(text)}
            for function in script["functions"]:
                own = function["ranges"][0]
                begin = max((each for each in begins if each <= own["startOffset"]), default=None)
                # A module itself is a function too.
                if (
                    begin is not None
                    and (STATIC / begins[begin]).is_file()
                    and own["startOffset"] > text.index("=> {", begin)
                ):
                    RUNS[begins[begin], function["functionName"], own["startOffset"] - begin] += own["count"]
