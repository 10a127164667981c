"""Reports of the planted runs in a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.look.report.build import make_report
from tests.look.planted import make_load, record_load
from tests.page.opened_file import OpenedFile
from tests.replay.index.runs import record_ranks

Reports = Callable[[str], Path]


@pytest.fixture(scope="session")
def planted_report(
    planted_run: Callable[[str], Path], look_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """The report of a planted run, by its name."""
    folder = tmp_path_factory.mktemp("reports")

    @cache
    def report(name: str) -> Path:
        path = folder / f"{name}.html"
        path.write_text(make_report(str(planted_run(name)), trust_local_plugins=True).html)
        return path

    return report


@pytest.fixture(scope="session")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with everything: two replicas that have too much to do, a what-if, and a second run under another router."""
    folder = tmp_path_factory.mktemp("full")
    load = make_load(3, rate=80, num_requests=80)
    runs = [
        record_load(folder / router, load, {"router": router, "replicas": 2, "max_num_seqs": 2})
        for router in ("pull", "round_robin")
    ]
    found = make_report(str(runs[0]), other=str(runs[1]), policies=[parse_plugin_spec("lrs")])
    path = folder / "full.html"
    path.write_text(found.html)
    return path


@pytest.fixture(scope="session")
def ranks_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three replicas that are split into stages and KV groups, and lose workers."""
    folder = tmp_path_factory.mktemp("ranks")
    path = folder / "ranks.html"
    path.write_text(make_report(str(record_ranks(folder))).html)
    return path


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., OpenedFile]]:
    """Open a file at a place. It must not load anything, log a problem or break its policy."""
    opened: list[OpenedFile] = []

    def open_page(path: Path, place: str = "", **settings: Any) -> OpenedFile:
        opened.append(OpenedFile(browser.new_context(**settings), path.as_uri(), place))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()
