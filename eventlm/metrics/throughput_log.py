"""A line in the log every few seconds of work: load, throughput, cache use and prefix hit rate, as vLLM prints it."""

from __future__ import annotations

from collections import Counter

import structlog

from eventlm.events import Event
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.store import MetricsStore
from eventlm.types import NANOSECONDS_PER_SECOND

log = structlog.get_logger("eventlm.engine")


_COUNTERS = ("prompt_tokens", "generation_tokens", "queried_tokens", "hit_tokens")


class ThroughputLog:
    """A bus handler. Attach it after the store's, whose sums it reads.

    It reads no clock: time is that of the events. Only time with live sequences counts.
    """

    def __init__(self, store: MetricsStore, *, interval_s: int) -> None:
        self._store = store
        self._interval_ns = interval_s * NANOSECONDS_PER_SECOND
        self._is_busy = False
        self._last_ns = self._busy_ns = 0
        #: Sums of _COUNTERS over all replicas at the last line.
        self._logged: Counter[str] = Counter()

    def observe(self, event: Event) -> None:
        """Add the next event, and log if there has been work for an interval since the last line."""
        if self._is_busy:
            self._busy_ns += event.ts - self._last_ns
            if self._busy_ns >= self._interval_ns:
                self._log(self._store.snapshot())
        self._last_ns = event.ts
        self._is_busy = self._store.num_live > 0

    def _log(self, snapshot: MetricsSnapshot) -> None:
        replicas = snapshot.replicas
        sums = Counter({name: sum(getattr(replica, name) for replica in replicas) for name in _COUNTERS})
        new = sums - self._logged
        seconds = self._busy_ns / NANOSECONDS_PER_SECOND
        used = sum(replica.num_held_blocks for replica in replicas) / snapshot.total_blocks
        log.info(
            "throughput",
            running=sum(replica.num_running for replica in replicas),
            waiting=sum(replica.num_waiting for replica in replicas),
            prompt_tokens_per_s=round(new["prompt_tokens"] / seconds, 1),
            generation_tokens_per_s=round(new["generation_tokens"] / seconds, 1),
            kv_cache_usage_percent=round(100 * used, 1),
            prefix_cache_hit_percent=round(100 * new["hit_tokens"] / new["queried_tokens"], 1)
            if new["queried_tokens"]
            else 0.0,
        )
        self._logged, self._busy_ns = sums, 0
