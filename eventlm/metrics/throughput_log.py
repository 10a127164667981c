"""A line in the log every few seconds of work: load, throughput, cache use and prefix hit rate, as vLLM prints it."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from eventlm.events import Event
from eventlm.metrics.aggregates import MetricsSnapshot
from eventlm.metrics.store import MetricsStore
from eventlm.types import NANOSECONDS_PER_SECOND

log = structlog.get_logger("eventlm.engine")


class _Tokens(NamedTuple):
    """Sums over all replicas since the start of the log."""

    prompt: int = 0
    generated: int = 0
    queried: int = 0
    hit: int = 0


class ThroughputLog:
    """A bus handler. Attach it after the store's, whose sums it reads.

    It reads no clock: time is that of the events, and only time with live sequences counts.
    """

    def __init__(self, store: MetricsStore, *, interval_s: int) -> None:
        self._store = store
        self._interval_ns = interval_s * NANOSECONDS_PER_SECOND
        self._is_busy = False
        self._last_ns = self._busy_ns = 0
        self._logged = _Tokens()

    def observe(self, event: Event) -> None:
        """Take in the next event, and log if there has been work for an interval since the last line."""
        if self._is_busy:
            self._busy_ns += event.ts - self._last_ns
            if self._busy_ns >= self._interval_ns:
                self._log(self._store.snapshot())
        self._last_ns = event.ts
        self._is_busy = self._store.num_live > 0

    def _log(self, snapshot: MetricsSnapshot) -> None:
        replicas = snapshot.replicas
        tokens = _Tokens(
            prompt=sum(replica.prompt_tokens for replica in replicas),
            generated=sum(replica.generation_tokens for replica in replicas),
            queried=sum(replica.queried_tokens for replica in replicas),
            hit=sum(replica.hit_tokens for replica in replicas),
        )
        new = _Tokens(*(now - before for now, before in zip(tokens, self._logged, strict=True)))
        seconds = self._busy_ns / NANOSECONDS_PER_SECOND
        used = sum(replica.num_held_blocks for replica in replicas) / (snapshot.num_blocks * len(replicas))
        log.info(
            "throughput",
            running=sum(replica.num_running for replica in replicas),
            waiting=sum(replica.num_waiting for replica in replicas),
            prompt_tokens_per_s=round(new.prompt / seconds, 1),
            generation_tokens_per_s=round(new.generated / seconds, 1),
            kv_cache_usage_percent=round(100 * used, 1),
            prefix_cache_hit_percent=round(100 * new.hit / new.queried, 1) if new.queried else 0.0,
        )
        self._logged, self._busy_ns = tokens, 0
