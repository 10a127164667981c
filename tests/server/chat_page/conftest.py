"""The chat page in a real browser without a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.server.chat_page.opened_page import OpenedPage


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
