"""The sums of the metrics store over a part of a run."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from msgspec import structs

from eventlm.events import Admitted, Arrived, Event, Header, Rejected
from eventlm.metrics.aggregates import MetricsSnapshot, ReplicaMetrics
from eventlm.metrics.live import observe_relayed, observe_request, observe_step
from eventlm.metrics.rows import COMPLETED, RelayedTokens, RequestRow, StepRow
from eventlm.metrics.service_classes import ClassSums

#: Counters of a replica that grow in the window as they happen, and gauges as they are at its end.
_COUNTED_AS_IT_HAPPENS = (
    "prompt_tokens", "cached_tokens", "queried_tokens", "hit_tokens", "num_deadlines_met", "num_deadlines_missed",
    "num_workers_lost",
)  # fmt: skip
_GAUGES = ("num_running", "num_waiting", "num_waiting_for_grammar", "num_held_blocks", "group_held_blocks", "is_up")


class WindowSums:
    """A snapshot's sums over a window: of the requests that arrived in it and the steps that overlap it.

    What belongs to neither (preemptions, lost workers, cache hits, operations, attempts) counts when it happens.
    """

    def __init__(self, header: Header) -> None:
        self._replicas = [ReplicaMetrics.of(core) for core in header.cores_of_replicas()]
        #: By replicaset, its first replica.
        self._firsts = list(accumulate((each.core.num_replicas for each in header.sets), initial=0))
        self._classes = ClassSums()
        self._num_requests = 0
        self._num_events = 0
        #: Requests that are neither admitted nor rejected.
        self._arriving: dict[int, Arrived] = {}

    def see(self, event: Event) -> None:
        """Add an event of the window."""
        self._num_events += 1
        match event:
            case Arrived():
                if not event.scheduling.is_branch:
                    self._num_requests += 1
                    self._classes.arrived(event)
                self._arriving[event.s] = event
            case Admitted():
                self._arriving.pop(event.request, None)
            case Rejected() if (request := self._arriving.pop(event.request, None)) is not None:
                reasons = self._replicas[self._firsts[request.replicaset]].reject_reasons
                reasons[event.reason] = reasons.get(event.reason, 0) + 1
                self._classes.rejected(request.scheduling, request.n, event.reason)

    def request_ended(self, row: RequestRow) -> None:
        """Add a sequence, not of a branch, whose request arrived in the window."""
        metrics = self._replicas[row.replica]
        metrics.finish_reasons[row.reason] = metrics.finish_reasons.get(row.reason, 0) + 1
        self._classes.ended(row)
        if row.reason in COMPLETED:
            observe_request(row, metrics)
        if row.prefill_e2e_time is not None:
            metrics.histograms["prefill_e2e_time"].observe(row.prefill_e2e_time)

    def step_completed(self, row: StepRow) -> None:
        """Add a step that overlaps the window."""
        metrics = self._replicas[row.replica]
        observe_step(row, metrics)
        metrics.generation_tokens += len(row.tokens)

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Add tokens that another server sent in the window."""
        observe_relayed(row, self._replicas[row.replica])

    def snapshot(self, before: MetricsSnapshot, after: MetricsSnapshot, duration_ns: int) -> MetricsSnapshot:
        """The sums, with the differences of what was counted as it happened between two snapshots of the store."""
        for metrics, old, new in zip(self._replicas, before.replicas, after.replicas, strict=True):
            for name in _COUNTED_AS_IT_HAPPENS:
                setattr(metrics, name, getattr(new, name) - getattr(old, name))
            for name in ("preempt_reasons", "op_ns"):
                counts = Counter(getattr(new, name))
                counts.subtract(getattr(old, name))
                setattr(metrics, name, {key: value for key, value in counts.items() if value})
            for name in _GAUGES:
                setattr(metrics, name, getattr(new, name))
            if new.backend is not None:
                metrics.backend = new.backend.since(old.backend)
        return structs.replace(
            after,
            num_events=self._num_events,
            duration_ns=duration_ns,
            num_requests=self._num_requests,
            num_unseen=after.num_unseen - before.num_unseen,
            num_cut=after.num_cut - before.num_cut,
            num_plugin_failures=after.num_plugin_failures - before.num_plugin_failures,
            replicas=self._replicas,
            classes=self._classes.snapshot(),
        )
