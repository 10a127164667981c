"""The dashboard in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.server.auth.test_api_keys import TWO_KEYS, write
from tests.server.conftest import RunningServer
from tests.server.dashboard.opened_dashboard import OpenedDashboard


@pytest.fixture
def guarded(start_server: Callable[..., RunningServer], tmp_path: Path) -> RunningServer:
    """A server with a key for requests and one for operators."""
    return start_server(api_keys_file=str(write(tmp_path / "keys.toml", TWO_KEYS)))


@pytest.fixture
def open_dashboard(browser: Browser) -> Iterator[Callable[..., OpenedDashboard]]:
    """Open the page of a server, as somebody does who was never there."""
    pages: list[OpenedDashboard] = []

    def open_dashboard(url: str, **settings: Any) -> OpenedDashboard:
        pages.append(OpenedDashboard(browser.new_context(**settings), url))
        return pages[-1]

    yield open_dashboard
    for page in pages:
        page.close()
