"""What the metrics store adds up by service class. Requests without a class are in none."""

from __future__ import annotations

from eventlm.events import Arrived
from eventlm.metrics.aggregates import ClassMetrics
from eventlm.metrics.rows import CANCELLED, RequestRow

#: A trace may name any number of classes.
MAX_CLASSES = 256
_OTHERS = "(others)"


class ClassSums:
    """All classes that have been seen."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassMetrics] = {}

    def arrived(self, event: Arrived) -> None:
        """A request came in."""
        if event.scheduling.service_class:
            self._of(event.scheduling.service_class).num_requests += 1

    def rejected(self, service_class: str, reason: str) -> None:
        """It was turned away."""
        if service_class:
            reasons = self._of(service_class).reject_reasons
            reasons[reason] = reasons.get(reason, 0) + 1

    def ended(self, row: RequestRow) -> None:
        """A sequence has ended."""
        if not row.service_class:
            return
        found = self._of(row.service_class)
        found.output_tokens += row.output_tokens
        found.num_dropped += row.reason == "deadline"
        found.num_deadlines_met += row.met_deadline is True
        found.num_deadlines_missed += row.met_deadline is False
        if row.met_slo is not None and row.reason not in CANCELLED:
            is_met = row.met_slo and row.is_complete
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
