"""A finding, and what all of them are computed from."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from eventlm.config.plugin_spec import format_plugin_spec
from eventlm.replay.index.gauges import WAIT_CAUSES
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import Column, MarkKind, SequencePhase
from eventlm.types import PluginKind

FindingKind = Literal[
    "starvation",
    "head_of_line",
    "preemption_thrash",
    "stall_with_free_blocks",
    "saturation",
    "imbalance",
    "lost_hits",
    "predictor_off",
    "plugin_failing",
    "worker_lost",
    "engine_down",
    "rejections",
    "backend_failing",
    "backend_down",
]
_PPM = 1_000_000
UNKNOWN = "unknown"


class Finding(Struct, frozen=True, kw_only=True):
    """Something that made the run worse.

    title: one sentence. text: its figures in words. culprit: what to change: a plug-in, a limit, a request.
    impact_ppm: the share of the run, or of its replicaset's part, that it concerns; findings are ordered by it.
    requests: sequences to look at, the worst first, as (request, index). s, ts: the event to look at and its time.
    command: what shows more there, beside the event itself. replicaset: by its place in the header.
    """

    kind: FindingKind
    title: str
    text: str
    culprit: str
    impact_ppm: int
    figures: dict[str, int]
    requests: list[tuple[int, int]] = []
    s: int = -1
    ts: int = -1
    command: str = ""
    replicaset: int = 0


class RunColumns:
    """The columns of a run that several findings need. Durations are ns; those of a drain last until the next one.

    number: the replicaset whose limits, plug-ins and replicas count, by its place in the header.
    """

    def __init__(self, index: Index, number: int = 0) -> None:
        self.index = index
        self.record = index.header.sets[number]
        self.config = self.record.core
        self.replicas = [replica for replica, own in enumerate(index.header.sets_of_replicas()) if own == number]

    def planned_s(self, s: int) -> int:
        """Where the plans of an event's drain are made; the event itself if the log ends before."""
        end_s = self.index.end_of_drain(s)
        return s if end_s is None else end_s

    def gauge(self, name: str, replica: int) -> Column:
        """By drain."""
        return self.index.gauge_by_drain(name, replica)

    @cached_property
    def drain_ns(self) -> Column:
        """How long each drain's state lasted."""
        return np.diff(self.index.drains["ts"], append=self.index.facts.last_ns)

    @cached_property
    def total_ns(self) -> int:
        """From the first drain to the end, at least 1."""
        return max(int(self.drain_ns.sum()), 1)

    def time(self, selected: NDArray[np.bool_]) -> int:
        """How long the selected drains lasted in all."""
        return int(self.drain_ns[selected].sum())

    def share_ppm(self, part: int, whole: int) -> int:
        """A share in parts per million."""
        return part * _PPM // whole if whole > 0 else 0

    @cached_property
    def launched(self) -> NDArray[np.bool_]:
        """The sequences that were admitted to a replica."""
        return self.index.requests["launched_ns"] >= 0

    @cached_property
    def waited_ns(self) -> Column:
        """From the arrival to the first admission, or to the end of what never had one; 0 if that was not seen."""
        requests = self.index.requests
        ends = np.where(requests["ended_ns"] >= 0, requests["ended_ns"], self.index.facts.last_ns)
        waited = np.where(self.launched, requests["launched_ns"], ends) - requests["arrived_ns"]
        return np.where(unseen(self.index), 0, waited)

    def while_waiting(self, row: int) -> tuple[int, int]:
        """Event and time of the drain in the middle of the wait for the first admission: what blocks it shows there."""
        drains = self.index.drains
        middle = int(self.index.requests["arrived_ns"][row] + self.waited_ns[row] // 2)
        at = max(int(np.searchsorted(drains["ts"], middle, side="right")) - 1, 0)
        return int(drains["s"][at]), int(drains["ts"][at])

    @cached_property
    def e2e_ns(self) -> Column:
        """From the arrival to the end, or to that of the log."""
        requests = self.index.requests
        ends = np.where(requests["ended_ns"] >= 0, requests["ended_ns"], self.index.facts.last_ns)
        return ends - requests["arrived_ns"]

    @cached_property
    def is_rejected(self) -> NDArray[np.bool_]:
        """The requests that were rejected."""
        rejected = [number for number, name in enumerate(self.index.names) if name.startswith("rejected: ")]
        return np.isin(self.index.requests["reason"], rejected)

    @cached_property
    def has_wait(self) -> NDArray[np.bool_]:
        """The sequences whose wait counts: the log has their whole life, and they were not rejected."""
        return ~self.is_rejected & ~unseen(self.index)

    @cached_property
    def step_ns(self) -> Column:
        """Of completed steps, in the worker, or in the slowest stage of a pipeline; 0 for others."""
        steps = self.index.steps
        return np.where(steps["done_s"] >= 0, steps["busy_ns"], 0)

    def identities(self, rows: Column) -> list[tuple[int, int]]:
        """The sequences of rows of `requests`."""
        requests = self.index.requests
        return list(zip(requests["request"][rows].tolist(), requests["index"][rows].tolist(), strict=True))

    def plugin(self, kind: PluginKind) -> str:
        """The kind and the spec of a plug-in that ran: "policy lrs"."""
        for record in self.record.plugins:
            if record.kind == kind:
                return f"{kind} {format_plugin_spec(record.parameters | {'type': record.name})}"
        return kind


def unseen(index: Index) -> NDArray[np.bool_]:
    """The sequences of which the log does not have the arrival, the end, or something between because of a gap."""
    requests, phases = index.requests, index.phases
    unknown = [number for number, name in enumerate(index.names) if name == UNKNOWN]
    found: NDArray[np.bool_] = (requests["is_seen"] == 0) | np.isin(requests["reason"], unknown)
    found[phases["row"][phases["phase"] == SequencePhase.UNSEEN]] = True
    return found


def lost_workers(index: Index) -> Column:
    """The rows of `marks` that are losses of workers, each once: one that is out of step is killed afterwards."""
    kinds, replicas = index.marks["kind"].tolist(), index.marks["replica"].tolist()
    down: set[int] = set()
    rows = []
    for row, (kind, replica) in enumerate(zip(kinds, replicas, strict=True)):
        if kind == MarkKind.WORKER_UP:
            down.discard(replica)
        elif kind in (MarkKind.WORKER_LOST, MarkKind.DESYNCED) and replica not in down:
            down.add(replica)
            rows.append(row)
    return np.array(rows, np.int64)


CAUSE_NUMBERS = {cause: number for number, cause in enumerate(WAIT_CAUSES)}
