"""How fast the timeline of a page is in headless Chromium, with 100,000 requests of 8 intervals each.

    python benchmarks/page_timeline.py [--requests N]

`ready`: from opening the file to the first picture. `draw`: the script's part of one picture, first and while zooming
and panning from the whole run to one step and back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy
from playwright.sync_api import Page, sync_playwright

from eventlm.page.document import single_file
from eventlm.page.linker import link, link_styles
from eventlm.page.timeline import pack_timeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser import CHROMIUM

INTERVALS = 8
STEP_NS = 20_000_000
REPLICAS = 4
ZOOMS = 60
NAMES_PIXELS = 112


def made_timeline(num_requests: int) -> dict[str, Any]:
    """Requests that arrive evenly; one in eight of the intervals is a preemption."""
    random = numpy.random.default_rng(1)
    count = num_requests * INTERVALS
    lengths = random.integers(1, 60, (num_requests, INTERVALS))
    arrived = numpy.arange(num_requests) * 2
    ends = arrived[:, None] + numpy.cumsum(lengths, axis=1)
    starts = ends - lengths
    last = int(ends.max()) + 1
    phases = numpy.tile([0, 1, 2, 2, 3, 4, 2, 2], num_requests)
    preempted = starts[:, 4]
    replica = numpy.arange(num_requests) % REPLICAS
    return pack_timeline(
        requests={
            "arrived": arrived * STEP_NS,
            "ended": ends[:, -1] * STEP_NS,
            "replica": replica,
            "class": numpy.arange(num_requests) % 3,
        },
        names=[f"request {number}" for number in range(num_requests)],
        classes=["interactive", "batch", "background"],
        intervals={
            "request": numpy.repeat(numpy.arange(num_requests), INTERVALS),
            "phase": phases,
            "start": starts.reshape(count) * STEP_NS,
            "end": ends.reshape(count) * STEP_NS,
            "first": starts.reshape(count),
            "last": ends.reshape(count) - 1,
        },
        steps={
            "replica": numpy.repeat(numpy.arange(REPLICAS), last),
            "step": numpy.tile(numpy.arange(last), REPLICAS),
            "start": numpy.tile(numpy.arange(last) * STEP_NS, REPLICAS),
        },
        marks={
            "kind": numpy.zeros(num_requests, int),
            "time": preempted * STEP_NS,
            "until": preempted * STEP_NS,
            "request": numpy.arange(num_requests),
            "replica": replica,
            "step": preempted,
        },
        end_ns=last * STEP_NS,
    )


def draws_ms(page: Page) -> list[float]:
    """How long the script drew each picture since the last call."""
    found: list[float] = page.evaluate(
        "(() => { const all = performance.getEntriesByName('timeline').map((each) => each.duration);"
        " performance.clearMeasures('timeline'); return all; })()"
    )
    return found


def measure(path: Path) -> dict[str, float]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        begun = time.perf_counter()
        page.goto(path.as_uri())
        # Not wait_for_function, which the page's policy refuses.
        page.evaluate(
            "new Promise((done) => { const look = () => performance.getEntriesByName('timeline').length ? done()"
            " : setTimeout(look, 5); look(); })"
        )
        ready = time.perf_counter() - begun
        page.wait_for_timeout(500)
        first, *_ = draws_ms(page)
        zooms: list[float] = []
        # A frame for each notch, as at a screen: events of one frame are drawn once.
        bounds = page.locator(".stage").bounding_box()
        assert bounds
        # Where there is the most to draw: in the middle of the run, beside the names.
        page.mouse.move(bounds["x"] + bounds["width"] / 2 + NAMES_PIXELS / 2, bounds["y"] + bounds["height"] / 2)
        for direction in (-100, 100):
            for _ in range(ZOOMS):
                page.mouse.wheel(0, direction)
                page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                zooms += draws_ms(page)
        browser.close()
    return {
        "ready_s": ready,
        "first_draw_ms": first,
        "zoom_median_ms": statistics.median(zooms),
        "zoom_p95_ms": statistics.quantiles(zooms, n=20)[-1],
        "draws": len(zooms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    begun = time.perf_counter()
    data = {"timeline": made_timeline(args.requests)}
    packed = time.perf_counter() - begun
    static = resources.files(__package__) / "page"
    html = single_file("Timeline", link("timeline_page.js", static), link_styles(), data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(html)
        print(f"packed in {packed:.2f} s, {len(html) / 1e6:.1f} MB")
        for name, value in measure(path).items():
            print(f"{name:16} {value:8.1f}")


if __name__ == "__main__":
    main()
