"""What the metrics store adds up: histograms, counters and gauges, one set for each replica. Integers only.

Times are nanoseconds. `histograms` and `families` declare what /metrics makes of them.
"""

from __future__ import annotations

from msgspec import Struct, field

from eventlm.metrics.histograms import LATENCY, TTFT, Histogram


class ReplicaMetrics(Struct, kw_only=True, gc=False):
    """Sums over one replica. Sequences are counted, not requests: each of a request's `n` samples is one.

    What no replica has yet (sequences in the shared queue, rejected requests) counts under replica 0, so that a sum
    over replicas is right.
    """

    histograms: dict[str, Histogram]
    #: Gauges. Running is a sequence from its launch on; waiting for its grammar is part of waiting.
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    num_held_blocks: int = 0
    is_up: bool = False
    #: Prompt tokens of sequences whose prefill is done, those of them that were hit, and tokens shown.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    #: Prompt tokens looked up in the prefix cache at a first admission, and those found.
    queried_tokens: int = 0
    hit_tokens: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_steps: int = 0
    busy_ns: int = 0
    num_workers_lost: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    preempt_reasons: dict[str, int] = field(default_factory=dict)
    reject_reasons: dict[str, int] = field(default_factory=dict)
    #: Nanoseconds by operation, where the workers were asked for them.
    op_ns: dict[str, int] = field(default_factory=dict)

    def copy(self) -> ReplicaMetrics:
        """One that later events do not change."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values = {name: value.copy() if isinstance(value, dict) else value for name, value in values.items()}
        values["histograms"] = {name: histogram.copy() for name, histogram in self.histograms.items()}
        return ReplicaMetrics(**values)


class ClassMetrics(Struct, kw_only=True, gc=False):
    """Sums over one class. It counts sequences, except in `num_requests` and `reject_reasons`.

    Deadlines are those of the requests themselves. One that the engine cut short has missed its objectives; one that
    was cancelled counts for neither.
    """

    num_requests: int = 0
    reject_reasons: dict[str, int] = field(default_factory=dict)
    num_complete: int = 0
    #: Ended because they were late.
    num_dropped: int = 0
    num_deadlines_met: int = 0
    num_deadlines_missed: int = 0
    num_slo_met: int = 0
    num_slo_missed: int = 0
    output_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram.over(TTFT))
    queue: Histogram = field(default_factory=lambda: Histogram.over(LATENCY))
    e2e: Histogram = field(default_factory=lambda: Histogram.over(LATENCY))

    def copy(self) -> ClassMetrics:
        """One that later events do not change."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        values = {
            name: value.copy() if isinstance(value, Histogram | dict) else value for name, value in values.items()
        }
        return ClassMetrics(**values)


class MetricsSnapshot(Struct, frozen=True, kw_only=True):
    """All that the store had added up when it was taken.

    duration_ns: what the log covers, which is less than the run where its first segments are not kept. num_unseen:
    sequences that ended and whose beginning the log does not hold. num_cut: sequences that were live when
    the log lost events; nothing more is measured of them.
    """

    model: str = ""
    num_blocks: int = 0
    num_events: int = 0
    duration_ns: int = 0
    num_requests: int = 0
    num_unseen: int = 0
    num_cut: int = 0
    num_plugin_failures: int = 0
    replicas: list[ReplicaMetrics] = []
    #: By name, in its order.
    classes: dict[str, ClassMetrics] = {}
