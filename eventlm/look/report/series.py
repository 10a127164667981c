"""What a run holds over time, with as many points as a screen has pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from eventlm.look.findings.finding import lost_workers
from eventlm.look.report.backends import tokens_until
from eventlm.page.columns import pack_columns
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind

#: Of a gauge the lowest and the highest value of each bucket are kept.
MAX_POINTS = 2_000
_MAX_RATE_BUCKETS = 150
_PPM = 1_000_000
_SECOND_NS = 1_000_000_000
#: Marks that are drawn into the charts, and how they are called.
_MARKED = {
    MarkKind.WORKER_LOST: "worker lost",
    MarkKind.DESYNCED: "worker lost",
    MarkKind.BACKEND_DOWN: "backend down",
    MarkKind.RECOVERED: "engine down",
    MarkKind.GAP: "gap",
    MarkKind.POLICY: "policy",
    MarkKind.PAUSED: "paused",
    MarkKind.CACHE_FLUSHED: "cache flushed",
    MarkKind.NOTE: "note",
}
_MAX_MARKS = 12
_LOST = (MarkKind.WORKER_LOST, MarkKind.DESYNCED)
GAUGES = ("waiting", "running", "partial", "free", "held", "cached")


def over_time(index: Index, base_ns: int) -> dict[str, Any]:
    """Gauges of all replicas together and of each, rates, and marks. Times are relative to `base_ns`."""
    replicas = range(index.header.num_replicas)
    by_replica = {name: [np.maximum(index.gauge_by_drain(name, replica), 0) for replica in replicas] for name in GAUGES}
    totals = {name: np.sum(values, axis=0) for name, values in by_replica.items()}
    # Those that wait for no replica yet are in the queue of each.
    totals["waiting"] = index.drains["waiting"]
    columns = dict(totals)
    if len(replicas) > 1:
        columns |= {f"{name}.{n}": by_replica[name][n] for name in ("waiting", "running") for n in replicas}
    times = np.maximum(index.drains["ts"] - base_ns, 0)
    gauges = thinned(times, columns)
    known = [name for name in GAUGES if any((index.gauges[name] >= 0).tolist())]
    marks = index.marks
    lost = set(lost_workers(index).tolist())
    marked = [
        n for n, kind in enumerate(marks["kind"].tolist()) if kind in _MARKED and (kind not in _LOST or n in lost)
    ]
    return {
        "gauges": pack_columns(gauges, units={"time": 1_000}),
        "known": known,
        "numReplicas": len(replicas),
        "rates": pack_columns(rates(index, base_ns), units={"time": 1_000}),
        "marks": [
            {"x": int(marks["ts"][n]) - base_ns, "label": _label(marks.row(n), len(replicas))}
            for n in marked[:_MAX_MARKS]
        ],
        "marksLeftOut": max(len(marked) - _MAX_MARKS, 0),
    }


def _label(mark: dict[str, int], num_replicas: int) -> str:
    if mark["kind"] == MarkKind.BACKEND_DOWN:
        return f"backend {mark['replica']} down"
    if mark["rank"] < 0:
        return _MARKED[MarkKind(mark["kind"])]
    of = f" of replica {mark['replica']}" if num_replicas > 1 else ""
    return f"rank {mark['rank']}{of} lost"


def thinned(times: Column, columns: dict[str, Column], max_points: int = MAX_POINTS) -> dict[str, Column]:
    """`time` and the columns as they are, or for each of equal buckets of time two points with the lowest and the
    highest value in the order in which they came. Times ascend strictly.
    """
    if len(times) <= max_points:
        return {"time": times, **columns}
    num_buckets = max_points // 2
    buckets = (times - times[0]) * num_buckets // (int(times[-1] - times[0]) + 1)
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    ends = np.append(starts[1:], len(times))
    is_pair = ends - starts > 1
    kept = np.sort(np.concatenate([starts, ends[is_pair] - 1]))
    found: dict[str, Column] = {"time": times[kept]}
    for name, values in columns.items():
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        rises = values[ends - 1] >= values[starts]
        first, second = np.where(rises, low, high), np.where(rises, high, low)
        places = np.searchsorted(kept, starts)
        points = np.empty(len(kept), np.int64)
        # A bucket with one drain has one point, which is its lowest and its highest value.
        points[places] = first
        points[places[is_pair] + 1] = second[is_pair]
        found[name] = points
    return found


def rates(index: Index, base_ns: int) -> dict[str, Column]:
    """By bucket of time: tokens a second; of steps the mean of sequences and of tokens, in hundredths, and of their
    time; hits of the cache in ppm of prompt tokens; how many preemptions, failed attempts, arrivals
    and rejections. -1: no value.
    """
    steps, requests, marks = index.steps, index.requests, index.marks
    span_ns = max(index.facts.last_ns - base_ns, 1)
    is_done = steps["done_s"] >= 0
    num_parts = int(is_done.sum()) + len(index.attempts)
    num_buckets = max(1, min(_MAX_RATE_BUCKETS, num_parts, span_ns // 1_000_000))
    edges = np.arange(num_buckets + 1) * span_ns // num_buckets

    def sums(times: Column, weights: Column | None = None) -> Column:
        places = np.clip((times - base_ns) * num_buckets // span_ns, 0, num_buckets - 1)
        return np.bincount(places, weights=weights, minlength=num_buckets).astype(np.int64)

    def a_second(values: Column) -> Column:
        return values * _SECOND_NS // np.maximum(np.diff(edges), 1)

    ends = steps["completed_ns"][is_done]
    num_steps = sums(ends)
    sizes = (steps["decodes"] + steps["chunks"])[is_done]
    took = np.maximum(steps["end_ns"] - steps["start_ns"], 0)[is_done]
    launched = requests["launched_ns"] >= 0
    prompts = sums(requests["launched_ns"][launched], requests["prompt_tokens"][launched])
    cached = sums(requests["launched_ns"][launched], requests["cached_tokens"][launched])
    is_rejected = marks["kind"] == MarkKind.REJECTED
    prompt_tokens = a_second(sums(ends, (steps["tokens"] - steps["decodes"])[is_done]))
    if not len(steps):
        # What backends compute of prompts, and when, is not known.
        prompt_tokens = np.full(num_buckets, -1)
    return {
        "time": edges[:-1],
        "output": a_second(sums(ends, steps["emitted"][is_done]) + np.diff(tokens_until(index, edges + base_ns))),
        "prompt": prompt_tokens,
        "batch": _mean(100 * sums(ends, sizes), num_steps),
        "batch_tokens": _mean(100 * sums(ends, steps["tokens"][is_done]), num_steps),
        "step": _mean(sums(ends, took), num_steps),
        "hit_ppm": _mean(cached * _PPM, prompts),
        "preemptions": sums(marks["ts"][marks["kind"] == MarkKind.PREEMPTED]),
        "failures": sums(marks["ts"][marks["kind"] == MarkKind.FORWARD_FAILED]),
        "arrivals": sums(requests["arrived_ns"][requests["index"] == 0]),
        "rejections": sums(marks["ts"][is_rejected]),
    }


def _mean(total: Column, count: Column) -> Column:
    return np.where(count > 0, total // np.maximum(count, 1), -1)
