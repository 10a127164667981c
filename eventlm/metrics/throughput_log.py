"""A line in the log every few seconds of work: load, throughput, cache use and prefix hit rate, as vLLM prints it; and
of other servers how many are up and how many attempts failed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import structlog

from eventlm.events import Event
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.store import MetricsStore
from eventlm.types import NANOSECONDS_PER_SECOND

log = structlog.get_logger("eventlm.engine")


_COUNTERS = ("prompt_tokens", "generation_tokens", "queried_tokens", "hit_tokens")
#: Of all other servers.
_FAILURES = "failures"


class ThroughputLog:
    """A bus handler. Attach it after the store's, whose sums it reads.

    It reads no clock: time is that of the events. Only time with live sequences counts.
    """

    def __init__(self, store: MetricsStore, *, interval_s: int) -> None:
        self._store = store
        self._interval_ns = interval_s * NANOSECONDS_PER_SECOND
        self._is_busy = False
        self._last_ns = self._busy_ns = 0
        #: Sums of _COUNTERS over all replicas at the last line, and the failures.
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
        backends = [each for each in replicas if each.backend is not None and not each.backend.is_gone]
        sums[_FAILURES] = sum(sum(each.backend.failures.values()) for each in backends if each.backend)
        new = sums - self._logged
        seconds = self._busy_ns / NANOSECONDS_PER_SECOND
        more: dict[str, Any] = {}
        if snapshot.total_blocks:
            used = sum(replica.num_held_blocks for replica in replicas) / snapshot.total_blocks
            more["kv_cache_usage_percent"] = round(100 * used, 1)
        if backends:
            more["backends_up"] = f"{sum(each.is_up for each in backends)}/{len(backends)}"
            more["failed_attempts"] = new[_FAILURES]
        log.info(
            "throughput",
            running=sum(replica.num_running for replica in replicas),
            waiting=sum(replica.num_waiting for replica in replicas),
            prompt_tokens_per_s=round(new["prompt_tokens"] / seconds, 1),
            generation_tokens_per_s=round(new["generation_tokens"] / seconds, 1),
            **more,
            prefix_cache_hit_percent=round(100 * new["hit_tokens"] / new["queried_tokens"], 1)
            if new["queried_tokens"]
            else 0.0,
        )
        self._logged, self._busy_ns = sums, 0
