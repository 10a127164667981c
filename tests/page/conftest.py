"""Pages in a real browser, from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from eventlm.page.document import single_file
from eventlm.page.linker import link, link_styles
from tests.page.opened_file import OpenedFile

STATIC = Path(__file__).parent / "static"


@pytest.fixture
def open_file(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., OpenedFile]]:
    """Open an entry module of tests/page/static with data. It must not do what a page should not."""
    opened: list[OpenedFile] = []

    def open_file(entry: str, data: Any, place: str = "", **settings: Any) -> OpenedFile:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(single_file("Gallery", link(entry, STATIC), link_styles(), data))
        opened.append(OpenedFile(browser.new_context(**settings), path.as_uri(), place))
        return opened[-1]

    yield open_file
    for page in opened:
        page.close()
