"""Sums of the metrics store by service class. Requests without a class count nowhere."""

from __future__ import annotations

from eventlm.events import Arrived
from eventlm.metrics.aggregates import ClassMetrics
from eventlm.metrics.rows import RequestRow
from eventlm.scheduling_params import SchedulingParams

#: A trace may name any number of classes.
MAX_CLASSES = 256
_OTHERS = "(others)"


class ClassSums:
    """The sums of each class."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassMetrics] = {}

    def arrived(self, event: Arrived) -> None:
        """A request came in."""
        if event.scheduling.service_class:
            self._of(event.scheduling.service_class).num_requests += 1

    def rejected(self, scheduling: SchedulingParams, n: int, reason: str) -> None:
        """A request for `n` samples was turned away."""
        if not scheduling.service_class:
            return
        found = self._of(scheduling.service_class)
        found.reject_reasons[reason] = found.reject_reasons.get(reason, 0) + 1
        found.num_deadlines_missed += n if scheduling.deadline_ns else 0
        found.num_slo_missed += n if scheduling.slo_ttft_ns or scheduling.slo_tpot_ns else 0

    def ended(self, row: RequestRow) -> None:
        """A sequence has ended."""
        if not row.service_class:
            return
        found = self._of(row.service_class)
        found.output_tokens += row.output_tokens
        found.num_dropped += row.reason == "deadline"
        found.num_deadlines_met += row.met_deadline is True
        found.num_deadlines_missed += row.met_deadline is False
        if row.met_slo is not None:
            is_met = row.met_slo and (row.is_complete or row.was_left)
            found.num_slo_met += is_met
            found.num_slo_missed += not is_met
        if row.prefill_e2e_time is not None:
            found.ttft.observe(row.prefill_e2e_time)
        if row.is_complete:
            found.num_complete += 1
            found.e2e.observe(row.request_e2e_time)
            if row.request_scheduling_delay is not None:
                found.queue.observe(row.request_scheduling_delay)

    def snapshot(self) -> dict[str, ClassMetrics]:
        """A copy, in order of name."""
        return {name: metrics.copy() for name, metrics in sorted(self._classes.items())}

    def _of(self, name: str) -> ClassMetrics:
        if name not in self._classes and len(self._classes) >= MAX_CLASSES:
            name = _OTHERS
        return self._classes.setdefault(name, ClassMetrics())
