"""A real browser without a window, for the tests of pages. The fixture `browser` in conftest.py is made of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

#: The first starts and draws faster.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; `make browser` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()
