"""What other servers did: lanes of attempts for the timeline, their sums, and the tokens that they sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from eventlm.page.timeline import PHASES
from eventlm.replay.export.lanes import Lanes
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind

#: Of all backends together.
_MAX_LANES = 24
_PPM = 1_000_000
_FIRST_TOKEN, _STREAMING, _FAILED = map(PHASES.index, ("first token there", "streaming", "retry"))
#: Ends of attempts that are no failures; those that are lost have died with the engine.
NO_FAILURES = ("answered", "withdrawn", "cut", "lost", "unknown")


class AttemptLanes(NamedTuple):
    """Names of lanes, and the lanes as `pack_timeline` takes them."""

    names: list[str]
    columns: dict[str, Column]


def backends_of(index: Index) -> list[int]:
    """The replicas that are other servers and have ever been up, or had a request."""
    servers = {replica for replica, core in enumerate(index.header.cores_of_replicas()) if core.forwards}
    marks = index.marks
    seen = set(marks["replica"][marks["kind"] == MarkKind.BACKEND_UP].tolist()) | set(index.backend_names)
    return sorted(servers & (seen | set(index.attempts["replica"].tolist())))


def num_failed(index: Index) -> int:
    """Attempts that failed."""
    return sum(_failures(index, slice(None)).values())


def _failures(index: Index, rows: Column | slice) -> Counter[str]:
    ends = (index.name(end) for end in index.attempts["end"][rows].tolist())
    return Counter(end for end in ends if end and end not in NO_FAILURES)


def backend_rows(index: Index, base_ns: int) -> list[dict[str, Any]]:
    """What each of them did."""
    attempts, requests = index.attempts, index.requests
    span_ns = max(index.facts.last_ns - base_ns, 1)
    durations = np.diff(index.drains["ts"], append=index.facts.last_ns)
    downs = index.marks["replica"][index.marks["kind"] == MarkKind.BACKEND_DOWN]
    found = []
    for replica in backends_of(index):
        own = np.flatnonzero(attempts["replica"] == replica)
        first = attempts["first_ns"][own] - attempts["sent_ns"][own]
        first = np.sort(first[(attempts["first_ns"][own] >= 0) & (attempts["sent_ns"][own] >= 0)])
        failures = _failures(index, own)
        served = requests["replica"] == replica
        prompts = int(requests["prompt_tokens"][served].sum())
        running = np.maximum(index.gauge_by_drain("running", replica), 0)
        found.append(
            {
                "replica": replica,
                "backend": index.backend_names.get(replica, ""),
                "attempts": len(own),
                "answered": _count(index, own, "answered"),
                "failed": sum(failures.values()),
                "failures": ", ".join(f"{kind} {count:,}" for kind, count in failures.most_common()),
                "retries": int((attempts["retry_ns"][own] >= 0).sum()),
                "hedges": int(attempts["is_hedge"][own].sum()),
                "withdrawn": _count(index, own, "withdrawn"),
                "ttftP50": int(first[(len(first) - 1) // 2]) if len(first) else None,
                "ttftP99": int(first[(len(first) - 1) * 99 // 100]) if len(first) else None,
                "output": int((attempts["total"] - attempts["before"])[own].sum()),
                "hitPpm": int(requests["cached_tokens"][served].sum()) * _PPM // prompts if prompts else None,
                "running": round(float((running * durations).sum()) / span_ns, 2),
                "limit": int(attempts["limit"][own].max(initial=0)) or None,
                "downs": int((downs == replica).sum()),
            }
        )
    return found


def _count(index: Index, rows: Column, end: str) -> int:
    names = [number for number, name in enumerate(index.names) if name == end]
    return int(np.isin(index.attempts["end"][rows], names).sum())


def attempt_lanes(index: Index, base_ns: int, end_ns: int) -> AttemptLanes:
    """A lane for each attempt that a backend had at once. Of many, as many as there is room for."""
    replicas = backends_of(index)[:_MAX_LANES]
    names: list[str] = []
    parts: list[tuple[int, int, int, int, int]] = []
    for replica in replicas:
        placed, num_lanes = _placed(index, replica)
        shown = min(num_lanes, max(_MAX_LANES // len(replicas), 1))
        hidden = f" (of {num_lanes})" if num_lanes > shown else ""
        parts += [
            (len(names) + lane, *part) for lane, attempt in placed if lane < shown for part in _parts(index, attempt)
        ]
        names += [f"backend {replica}{hidden}" if lane == 0 else "" for lane in range(shown)]
    columns = dict(zip(("lane", "start", "end", "phase", "step"), np.array(sorted(parts), np.int64).T, strict=False))
    if not columns:
        return AttemptLanes([], {})
    for name in ("start", "end"):
        columns[name] = np.clip(columns[name] - base_ns, 0, end_ns)
    nothing = np.zeros_like(columns["lane"])
    return AttemptLanes(names, columns | {"came": columns["start"], "tokens": nothing, "most": nothing})


def _placed(index: Index, replica: int) -> tuple[list[tuple[int, int]], int]:
    """(lane, row) of a backend's attempts, and how many lanes it takes to draw all of them."""
    attempts = index.attempts
    lanes, placed = Lanes(), []
    own = np.flatnonzero((attempts["replica"] == replica) & (attempts["sent_ns"] >= 0))
    under_way: list[tuple[int, int]] = []
    for row in own[np.argsort(attempts["sent_ns"][own], kind="stable")].tolist():
        sent_ns = int(attempts["sent_ns"][row])
        for lane, ended_ns in [each for each in under_way if each[1] <= sent_ns]:
            lanes.give(lane, ended_ns)
        under_way = [each for each in under_way if each[1] > sent_ns]
        lane = lanes.take(sent_ns)
        placed.append((lane, row))
        under_way.append((lane, _ended_ns(index, row)))
    return placed, len(lanes)


def _ended_ns(index: Index, row: int) -> int:
    ended_ns = int(index.attempts["ended_ns"][row])
    return ended_ns if ended_ns >= 0 else index.facts.last_ns


def _parts(index: Index, row: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, end, phase, request) of an attempt: until its first tokens, and after them; a failed one is lost."""
    attempts = index.attempts
    sent_ns, first_ns, ended_ns = int(attempts["sent_ns"][row]), int(attempts["first_ns"][row]), _ended_ns(index, row)
    request = int(index.requests["request"][attempts["row"][row]])
    is_failed = index.name(int(attempts["end"][row])) not in ("", *NO_FAILURES)
    if first_ns < 0:
        yield sent_ns, ended_ns, _FAILED if is_failed else _FIRST_TOKEN, request
        return
    yield sent_ns, first_ns, _FIRST_TOKEN, request
    yield first_ns, ended_ns, _STREAMING, request


def tokens_until(index: Index, times: Column) -> Column:
    """How many tokens backends had sent by each time, as if each attempt sent them evenly from its first ones on."""
    attempts = index.attempts
    tokens = attempts["total"] - attempts["before"]
    rows = np.flatnonzero((tokens > 0) & (attempts["first_ns"] >= 0))
    ended = np.where(attempts["ended_ns"] >= 0, attempts["ended_ns"], index.facts.last_ns)[rows]
    first = attempts["first_ns"][rows]
    # A token now and then is as good as evenly sent.
    begun = np.searchsorted(np.sort(first), times, side="right")
    order_first, order_ended = np.argsort(first, kind="stable"), np.argsort(ended, kind="stable")
    done = np.searchsorted(ended[order_ended], times, side="right")
    rate = tokens[rows] / np.maximum(ended - first, 1)
    slope = _sums(rate[order_first])[begun] - _sums(rate[order_ended])[done]
    offset = _sums((rate * first)[order_first])[begun] - _sums((rate * first)[order_ended])[done]
    whole = _sums(tokens[rows][order_ended].astype(np.float64))[done]
    return np.rint(whole + slope * times - offset).astype(np.int64)


def _sums(values: np.typing.NDArray[np.float64]) -> np.typing.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values)])
