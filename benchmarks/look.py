"""What it takes to look at a run: its index, findings and report, and the page in headless Chromium.

    python benchmarks/look.py TRACE [index findings report page zoom]

Prints a table of what was measured beside the targets, which are for the simulated Azure hour on two cores. `index` and
`report` begin without a cache, which is then there for the others. `zoom` needs no trace: it draws 100,000 requests.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import sync_playwright

from eventlm.look.findings.find import find_all
from eventlm.look.report.build import make_report
from eventlm.page.document import single_file
from eventlm.page.linker import link, link_styles
from eventlm.replay.index.open import open_index
from eventlm.table import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import page_timeline
from tests.browser import CHROMIUM

MEBIBYTE = 1024 * 1024


class Row(NamedTuple):
    """A figure and its target, in one unit."""

    name: str
    measured: float
    target: float
    unit: str


def index(trace: str, folder: Path) -> Iterator[Row]:
    """Made, and opened again."""
    yield Row("index made", _seconds(lambda: open_index(trace)), 45, "s")
    yield Row("index opened", _seconds(lambda: open_index(trace)), 1, "s")


def findings(trace: str, folder: Path) -> Iterator[Row]:
    """Of an index that is there."""
    opened = open_index(trace)
    yield Row("findings", _seconds(lambda: find_all(opened)), 1, "s")


def report(trace: str, folder: Path) -> Iterator[Row]:
    """From nothing, and from the kept index."""
    os.environ["EVENTLM_HOME"] = str(folder / "empty")
    yield Row("report, verified", _seconds(lambda: make_report(trace)), 45, "s")
    yield Row("report, index kept", _seconds(lambda: make_report(trace)), 5, "s")
    yield Row("report, size", len(make_report(trace).html.encode()) / MEBIBYTE, 3, "MiB")


def page(trace: str, folder: Path) -> Iterator[Row]:
    """From opening the report to what its reader sees."""
    path = folder / "report.html"
    path.write_text(make_report(trace).html)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        shown = browser.new_page(viewport={"width": 1440, "height": 900})

        def overview() -> None:
            shown.goto(f"{path.as_uri()}#overview")
            shown.get_by_role("table", name="Latencies of all sequences").wait_for()

        def timeline() -> None:
            shown.goto("about:blank")
            shown.goto(f"{path.as_uri()}#timeline")
            # Not wait_for_function, which the page's policy refuses.
            shown.evaluate(
                "new Promise((done) => { const look = () => performance.getEntriesByName('timeline').length ? done()"
                " : setTimeout(look, 5); look(); })"
            )

        yield Row("overview drawn", _seconds(overview), 1.5, "s")
        yield Row("timeline drawn", _seconds(timeline), 3, "s")
        browser.close()


def zoom(trace: str, folder: Path) -> Iterator[Row]:
    """Of a timeline of 100,000 requests with 8 intervals each."""
    path = folder / "timeline.html"
    data = {"timeline": page_timeline.made_timeline(100_000)}
    pages = resources.files(__package__) / "page"
    path.write_text(single_file("Timeline", link("timeline_page.js", pages), link_styles(), data))
    yield Row("zoom, p95", page_timeline.measure(path)["zoom_p95_ms"], 33, "ms")


SECTIONS: dict[str, Callable[[str, Path], Iterator[Row]]] = {
    "index": index,
    "findings": findings,
    "report": report,
    "page": page,
    "zoom": zoom,
}


def _seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVENTLM_HOME"] = folder
        for name in arguments.sections or SECTIONS:
            for row in SECTIONS[name](arguments.trace, Path(folder)):
                print(f"{row.name}: {row.measured:.2f} {row.unit}", flush=True)
                rows.append([row.name, f"{row.measured:.2f}", f"{row.target:g}", row.unit])
    print("\n".join(table(["", "measured", "target", ""], rows, left=(0, 3))))


if __name__ == "__main__":
    main()
