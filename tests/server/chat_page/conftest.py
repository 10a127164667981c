"""The chat page in a real browser without a window."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.server.chat_page.opened_page import OpenedPage

#: The first starts and draws faster.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


# Not for the session: while playwright runs, no test in this process can run a loop of asyncio.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; `make browser` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., OpenedPage]]:
    """Open the page of a server, as somebody does who was never there. It must not do what a page should not."""
    pages: list[OpenedPage] = []

    def open_page(url: str, **settings: Any) -> OpenedPage:
        pages.append(OpenedPage(browser.new_context(**settings), url))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()
