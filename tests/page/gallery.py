"""What the gallery shows."""

from __future__ import annotations

from typing import Any

import numpy

from eventlm.page.columns import pack_columns
from eventlm.page.timeline import pack_timeline

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
        "timeline": timeline_data(),
    }
    return data | texts


def timeline_data(
    num_requests: int = 60, num_steps: int = 400, step_ns: int = 10_000_000, name: str = "", *, has_lanes: bool = False
) -> dict[str, Any]:
    """A timeline on two replicas: each request waits, is prefilled, decodes, and one in five is preempted meanwhile.

    A worker is lost in the middle of the run, and some of it was not recorded. name: of all requests and classes.
    has_lanes: with the lanes of two stages and two KV groups.
    """
    random = numpy.random.default_rng(3)
    arrived = numpy.sort(random.integers(0, num_steps * 3 // 4, num_requests))
    replica = numpy.arange(num_requests) % 2
    rows: list[tuple[int, int, int, int]] = []
    marks: list[tuple[int, int, int, int, int]] = []
    ends = []
    for request in range(num_requests):
        lengths = random.integers(1, 8, 2).tolist()
        plan = [(0, int(lengths[0])), (1, int(lengths[1])), (2, int(random.integers(5, num_steps // 5)))]
        if request % 5 == 4:
            plan += [(3, 6), (4, 2), (2, 10)]
        at = int(arrived[request])
        for phase, length in plan:
            rows.append((request, phase, at, at + length))
            if phase == 3:
                marks.append((0, at, at, request, int(replica[request])))
            at += length
        ends.append(at)
    half = num_steps // 2
    marks += [(2, half, half, -1, 1), (3, half + 20, half + 35, -1, -1)]
    last = max(ends)
    request, phase, start, end = numpy.array(rows).T
    kind, time, until, of_request, of_replica = numpy.array(marks).T
    steps = numpy.tile(numpy.arange(last), 2)
    return pack_timeline(
        requests={
            "arrived": arrived * step_ns,
            "ended": numpy.array(ends) * step_ns,
            "replica": replica,
            "class": numpy.arange(num_requests) % 3 % 2,
        },
        names=[name or f"request {each}" for each in range(num_requests)],
        classes=[name or "chat", name or "batch"],
        intervals={
            "request": request,
            "phase": phase,
            "start": start * step_ns,
            "end": end * step_ns,
            "first": start,
            "last": end - 1,
        },
        steps={"replica": numpy.repeat([0, 1], last), "step": steps, "start": steps * step_ns},
        marks={
            "kind": kind,
            "time": time * step_ns,
            "until": until * step_ns,
            "request": of_request,
            "replica": of_replica,
            "step": time,
        },
        end_ns=last * step_ns,
        lanes=_lanes(num_steps // 40, step_ns) if has_lanes else None,
        lane_names=LANES if has_lanes else (),
    )


LANES = ("stage 0", "stage 1", "group 0", "group 1")


def _lanes(num_steps: int, step_ns: int) -> dict[str, Any]:
    """In every 20 units of time the first stage has a step for 14. It waits for 1 until the second stage is free, which
    gets it after another 1 and has it for 19. The first of two groups has half as many tokens as the other.
    """
    steps = numpy.arange(num_steps)
    nothing = numpy.zeros_like(steps)
    starts = (steps * 20, 16 + steps * 20, steps * 20, steps * 20)
    lengths, tokens = (14, 19, 14, 14), (0, 0, 50, 100)
    return {
        "lane": numpy.repeat(range(len(LANES)), num_steps),
        "step": numpy.tile(steps, len(LANES)),
        "phase": numpy.tile(1 + (steps > 0), len(LANES)),
        "tokens": numpy.repeat(tokens, num_steps),
        "most": numpy.concatenate([nothing, nothing, nothing + 100, nothing + 100]),
        "start": numpy.concatenate(starts) * step_ns,
        "end": (numpy.concatenate(starts) + numpy.repeat(lengths, num_steps)) * step_ns,
        "came": numpy.concatenate([starts[0], starts[0] + 14, starts[2], starts[3]]) * step_ns,
    }
