"""What the timeline of a report draws, and what it says of a request that is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from eventlm.look.report.backends import attempt_lanes
from eventlm.look.report.measures import MEASURES, Measures
from eventlm.look.report.ranks import StageTimes, lanes
from eventlm.page.columns import pack_columns
from eventlm.page.timeline import MARKS, PHASES, pack_timeline
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind, SequencePhase

#: Times are shown in microseconds.
UNIT_NS = 1_000
_PHASES = {
    SequencePhase.QUEUE: "waiting",
    SequencePhase.PREFILL: "prefill",
    SequencePhase.DECODE: "decode",
    SequencePhase.PREEMPTED: "preempted",
    SequencePhase.RECOMPUTE: "recompute",
}
#: Of requests for other servers.
_FORWARDED_PHASES = {
    SequencePhase.QUEUE: "waiting",
    SequencePhase.PREFILL: "first token there",
    SequencePhase.DECODE: "streaming",
    SequencePhase.RETRY: "retry",
}
_MARKS = {
    MarkKind.PREEMPTED: "preempted",
    MarkKind.REJECTED: "rejected",
    MarkKind.FAILED: "failed",
    MarkKind.WORKER_LOST: "worker lost",
    MarkKind.DESYNCED: "worker lost",
    MarkKind.GAP: "gap",
    MarkKind.CANCELLED: "cancelled",
    MarkKind.FORWARD_FAILED: "attempt failed",
    MarkKind.BACKEND_DOWN: "backend down",
    MarkKind.RECOVERED: "engine down",
}
#: Marks that are of one request.
_OF_REQUESTS = (
    MarkKind.PREEMPTED,
    MarkKind.REJECTED,
    MarkKind.FAILED,
    MarkKind.CANCELLED,
    MarkKind.FORWARD_FAILED,
)


def request_name(request: int, number: int, samples: int) -> str:
    """As on the command line."""
    return f"{request}.{number}" if samples > 1 else str(request)


def request_names(index: Index) -> list[str]:
    """By row of `requests`."""
    columns = (index.requests[name].tolist() for name in ("request", "index", "samples"))
    return [request_name(*each) for each in zip(*columns, strict=True)]


class LaunchTimes:
    """When the steps of each replica were launched, to find those that ran meanwhile."""

    def __init__(self, index: Index) -> None:
        steps = index.steps
        self._order = np.lexsort((steps["step"], steps["replica"]))
        self._of_replica: dict[int, tuple[Column, Column]] = {}
        for replica in np.unique(steps["replica"]).tolist():
            rows = self._order[steps["replica"][self._order] == replica]
            rows = rows[steps["launched_ns"][rows] >= 0]
            self._of_replica[replica] = (steps["launched_ns"][rows], steps["step"][rows])

    @property
    def order(self) -> Column:
        """Rows of `steps` by replica, then by number."""
        return self._order

    def next_step(self, replicas: Column, times: Column) -> Column:
        """The first step of a replica launched at or after a time; one more than its last if there is none, and 0 on a
        replica without steps.
        """
        found = np.zeros(len(times), np.int64)
        for replica, (launched, steps) in self._of_replica.items():
            chosen = np.flatnonzero(replicas == replica)
            if len(chosen) and len(steps):
                places = np.searchsorted(launched, times[chosen])
                found[chosen] = np.append(steps, steps[-1] + 1)[places]
        return found


def timeline_data(index: Index, stages: StageTimes, base_ns: int) -> dict[str, Any]:
    """As `timeline.js` takes it; row numbers are those of `requests`. base_ns: what times are relative to."""
    requests, steps = index.requests, index.steps
    end_ns = max(index.facts.last_ns - base_ns, 1)
    times = LaunchTimes(index)
    classes, class_codes = np.unique(requests["service_class"], return_inverse=True)
    ended = np.where(requests["ended_ns"] >= 0, requests["ended_ns"] - base_ns, end_ns)
    arrived = np.clip(requests["arrived_ns"] - base_ns, 0, end_ns)
    ordered = times.order
    starts = np.where(steps["start_ns"] >= 0, steps["start_ns"], steps["launched_ns"])[ordered]
    lane_names, of_lanes = lanes(index, stages, base_ns, end_ns)
    lane_nouns = ["step"] * len(lane_names)
    backends = attempt_lanes(index, base_ns, end_ns)
    if backends.names:
        added = backends.columns | {"lane": backends.columns["lane"] + len(lane_names)}
        of_lanes = {name: np.concatenate([of_lanes.get(name, added[name][:0]), added[name]]) for name in added}
        lane_names = [*lane_names, *backends.names]
        lane_nouns += ["request"] * len(backends.names)
    return pack_timeline(
        requests={
            "arrived": arrived,
            "ended": np.maximum(np.minimum(ended, end_ns), arrived),
            "replica": requests["replica"],
            "class": class_codes,
        },
        names=request_names(index),
        classes=[index.name(each) or "no class" for each in classes.tolist()] or ["no class"],
        intervals=_intervals(index, times, base_ns, end_ns),
        steps={
            "replica": steps["replica"][ordered],
            "step": steps["step"][ordered],
            "start": np.clip(starts - base_ns, 0, end_ns),
        },
        marks=_marks(index, times, base_ns, end_ns),
        end_ns=end_ns,
        unit_ns=UNIT_NS,
        lanes=of_lanes if lane_names else None,
        lane_names=lane_names,
        lane_nouns=lane_nouns,
    )


def _intervals(index: Index, times: LaunchTimes, base_ns: int, end_ns: int) -> dict[str, Column]:
    phases = index.phases
    are_servers = np.array([bool(each.core.forwards) for each in index.header.sets])
    is_forwarded = are_servers[index.requests["replicaset"]][phases["row"]]
    code = np.where(is_forwarded, _codes(_FORWARDED_PHASES)[phases["phase"]], _codes(_PHASES)[phases["phase"]])
    rows = np.flatnonzero((code >= 0) & (phases["row"] >= 0))
    rows = rows[np.lexsort((phases["start_ns"][rows], phases["row"][rows]))]
    request = phases["row"][rows]
    start = np.clip(phases["start_ns"][rows] - base_ns, 0, end_ns)
    raw_end = phases["end_ns"][rows]
    end = np.maximum(np.clip(np.where(raw_end >= 0, raw_end - base_ns, end_ns), 0, end_ns), start)
    replicas = index.requests["replica"][request]
    first, last = phases["first_step"][rows], phases["last_step"][rows]
    meanwhile = times.next_step(replicas, start + base_ns)
    # Where no step had it, those that were launched meanwhile.
    until = times.next_step(replicas, end + base_ns) - 1
    return {
        "request": request,
        "phase": code[rows],
        "start": start,
        "end": end,
        "first": np.where(first >= 0, first, meanwhile),
        "last": np.where(first >= 0, np.maximum(last, first), np.maximum(until, meanwhile - 1)),
    }


def _codes(names: dict[SequencePhase, str]) -> Column:
    """By phase, the code of its name; -1: it is not drawn."""
    codes = np.full(max(SequencePhase) + 1, -1, np.int64)
    for phase, name in names.items():
        codes[phase] = PHASES.index(name)
    return codes


def _marks(index: Index, times: LaunchTimes, base_ns: int, end_ns: int) -> dict[str, Column]:
    marks = index.marks
    chosen = np.flatnonzero(np.isin(marks["kind"], [int(kind) for kind in _MARKS]))
    kinds = marks["kind"][chosen]
    codes = {int(kind): MARKS.index(name) for kind, name in _MARKS.items()}
    request = [
        -1
        if kind not in _OF_REQUESTS
        else (-1 if (row := index.find_row(int(number), max(int(place), 0))) is None else row)
        for kind, number, place in zip(kinds, marks["request"][chosen], marks["index"][chosen], strict=True)
    ]
    # A gap lasts until the drain that follows it.
    drains = np.append(index.drains["ts"], index.facts.last_ns)
    after = drains[np.minimum(np.searchsorted(index.drains["ts"], marks["ts"][chosen], side="right"), len(drains) - 1)]
    until = np.where(kinds == MarkKind.GAP, after, marks["ts"][chosen])
    rows = np.array(request, np.int64)
    replica = marks["replica"][chosen]
    if len(index.requests):
        replica = np.where((replica < 0) & (rows >= 0), index.requests["replica"][rows], replica)
    time = np.clip(marks["ts"][chosen] - base_ns, 0, end_ns)
    return {
        "kind": np.array([codes[int(kind)] for kind in kinds], np.int64),
        "time": time,
        "until": np.maximum(np.clip(until - base_ns, 0, end_ns), time),
        "request": rows,
        "replica": replica,
        "step": times.next_step(np.maximum(replica, 0), marks["ts"][chosen]),
    }


def request_columns(index: Index, measures: Measures) -> dict[str, Any]:
    """What is known of each request, by row: tokens, latencies, how it ended, and how urgent it was. Packed."""
    requests = index.requests
    columns = {name: getattr(measures, name) for name in MEASURES}
    columns |= {
        "prompt": requests["prompt_tokens"],
        "output": requests["output_tokens"],
        "cached": requests["cached_tokens"],
        "preemptions": requests["preemptions"],
        "reason": requests["reason"],
        "priority": requests["priority"],
    }
    return pack_columns(columns, units=dict.fromkeys(MEASURES, UNIT_NS))


def stretch_columns(index: Index) -> dict[str, Any]:
    """Consecutive steps that a request was in, by which one finds who shared its steps. Packed."""
    stretches = index.stretches
    known = stretches["row"] >= 0
    columns = {
        "row": stretches["row"][known],
        "replica": stretches["replica"][known],
        "first": stretches["first_step"][known],
        "last": stretches["last_step"][known],
        "chunk": stretches["is_chunk"][known],
        "tokens": np.where(stretches["is_chunk"] == 1, stretches["tokens"], 0)[known],
    }
    return pack_columns(columns, relative_to={"last": "first"})
