"""What the gallery shows."""

from __future__ import annotations

from typing import Any

import numpy

from eventlm.page.columns import pack_columns

ROWS = 120
STEPS = 2_000


def gallery_data(**texts: Any) -> dict[str, Any]:
    """A queue of 20 s and 120 requests, with other texts if wanted."""
    random = numpy.random.default_rng(0)
    waiting = numpy.abs(numpy.cumsum(random.integers(-3, 4, STEPS)))
    cards = [
        {
            "title": "Head of line",
            "tone": "bad",
            "verdict": "serious",
            "text": "Request 17 waited for blocks while 40 shorter ones stood behind it.",
            "figures": [
                {"label": "waited", "value": "12.3 s"},
                {"label": "behind it", "value": "40", "note": "requests"},
            ],
        },
        {"title": "Thrash", "tone": "warning", "verdict": "look", "text": "Twice.", "figures": []},
        {"title": "Latency", "text": "All requests", "figures": [{"label": "p99 first token", "value": "4.01 s"}]},
    ]
    rows = [
        {
            "name": f"request {number}",
            "kind": ("chat", "batch")[number % 2],
            "prompt": int(random.integers(1, 30_000)),
            "ttft": None if number == 7 else int(random.integers(10**6, 10**11)),
            "hits": number / ROWS,
        }
        for number in range(ROWS)
    ]
    gauges = {
        "time": numpy.arange(STEPS) * 10**7,
        "waiting": waiting,
        "running": numpy.abs(waiting - 20) % 64,
        "free": 10**9 + waiting * 10**6,
    }
    data = {
        "title": "A run",
        "details": ["trace.jsonl", "120 requests"],
        "notice": "Events 12 to 40 were not recorded.",
        "cards": cards,
        "rows": rows,
        "gauges": pack_columns(gauges),
    }
    return data | texts
