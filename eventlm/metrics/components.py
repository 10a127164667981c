"""Figures of the engine's parts that are not in the log: time spent planning, bytes, lags."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from msgspec import Struct

from eventlm.core.core import Core
from eventlm.events import Decision, Fact, Marker
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.histograms import Histogram, seconds
from eventlm.system.clock import Clock

SCHEDULING_BUCKETS_NS = seconds(".00001 .000025 .00005 .0001 .00025 .0005 .001 .0025 .005 .01 .025 .05 .1 1")
SYNC_BUCKETS_NS = seconds(".0001 .00025 .0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10")


#: HTTP requests that have ended: route, method and class of status (`2xx`), how many, and their time in ns.
HttpRequests = list[tuple[str, str, str, int, int]]


def added(*parts: HttpRequests) -> HttpRequests:
    """The sums, in the order of the labels."""
    totals: dict[tuple[str, str, str], tuple[int, int]] = {}
    for handler, method, status, count, total_ns in chain.from_iterable(parts):
        found = totals.get((handler, method, status), (0, 0))
        totals[handler, method, status] = (found[0] + count, found[1] + total_ns)
    return [(*labels, *total) for labels, total in sorted(totals.items())]


class CacheInfo(Struct, frozen=True, kw_only=True):
    """How each replica's KV cache is configured. The last two are as in the configuration."""

    block_size: int
    num_blocks: int
    prefix_cache: bool
    dtype: str
    gpu_memory_utilization: str


class RecorderMetrics(Struct, frozen=True, kw_only=True):
    """Bytes that the recorder has written, and events that it has not written yet. sync_time: ns to sync the trace.

    If a full disk stops it, a `gap` will replace those.
    """

    num_bytes: int
    num_events_behind: int
    is_writing: bool
    sync_time: Histogram


class FrontEndMetrics(Struct, frozen=True, kw_only=True):
    """One front end: requests that generate, and what its process uses; 0 while it has none.

    http_requests: of all its successive processes.
    """

    index: int
    is_up: bool
    num_restarts: int
    num_requests: int = 0
    cpu_ns: int = 0
    resident_bytes: int = 0
    http_requests: HttpRequests = []


class SpanExportMetrics(Struct, frozen=True, kw_only=True):
    """The process that exports spans: spans sent, dropped by reason and waiting, posts that failed, and events that it
    has not read.
    """

    is_up: bool
    num_sent: int
    num_dropped: dict[str, int]
    num_failures: int
    num_waiting: int
    num_events_behind: int
    num_restarts: int


class EngineMetrics(Struct, frozen=True, kw_only=True):
    """All figures of an engine: those of its log, and those of its own parts. now_ns: when, by the run's clock.

    paused: whether an operator has paused launches. num_waiting_for_room: replicas whose launcher has no room for them.
    num_recoveries: how often an engine has died in this run, and another one went on.
    scheduling_time: ns to apply a tick's last fact, where plans are made; policy, batcher and router are part of it.
    recorder is None if nothing is recorded, front_ends empty if the engine's own process serves HTTP, span_export None
    without `--otlp-endpoint`. cache is None before the start; other_caches: of the further replicasets.
    rate_limited: requests refused by a key's limit, which are not in the log, by service class ('' for none).
    http_requests: those to the engine's own process.
    """

    log: MetricsSnapshot
    state: Literal["loading", "ready", "draining", "dead"]
    scheduling_time: Histogram
    paused: bool = False
    num_waiting_for_room: int = 0
    num_recoveries: int = 0
    now_ns: int = 0
    recorder: RecorderMetrics | None = None
    cache: CacheInfo | None = None
    other_caches: list[CacheInfo] = []
    span_export: SpanExportMetrics | None = None
    front_ends: list[FrontEndMetrics] = []
    rate_limited: dict[str, int] = {}
    http_requests: HttpRequests = []


class TimedCore(Core):
    """A core in place of another one, which measures how long it plans. The times are not part of its state."""

    def __init__(self, core: Core, times: Histogram, clock: Clock) -> None:
        self.state = core.state
        self._times = times
        self._clock = clock

    def apply(self, event: Fact | Marker) -> list[Decision]:
        """As `Core.apply`."""
        start_ns = self._clock.monotonic_ns()
        decisions = super().apply(event)
        if isinstance(event, Fact) and event.p:
            self._times.observe(self._clock.monotonic_ns() - start_ns)
        return decisions
