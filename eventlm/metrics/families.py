"""The families of /metrics, each declared once: kind, name, help, labels and where its samples come from.

Names, labels and buckets are vLLM's; `eventlm:` has what only eventlm has. Labels are `model_name` and `engine`, the
number of the replica. A "request" in vLLM's names is one sequence: each of a request's `n` samples counts. What belongs
to no replica yet counts under engine 0, so that sums are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from eventlm.metrics.aggregates import ClassMetrics, ReplicaMetrics
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics, RecorderMetrics
from eventlm.metrics.histograms import HISTOGRAMS, Histogram, HistogramFamily
from eventlm.types import NANOSECONDS_PER_SECOND

#: vLLM's words for how a request finished, by ours.
FINISHED_REASONS = {
    "eos": "stop",
    "stop_token": "stop",
    "stop": "stop",
    "grammar": "stop",
    "tool_calls": "stop",
    "complete": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "front_end_lost": "abort",
    "error": "error",
}
#: Why requests are turned away. The log has those that arrived; it never has those that a key's limit refuses.
RATE_LIMITED = "rate_limit"
REJECT_REASONS = ("queue_full", "context_length", RATE_LIMITED)
STATES = ("loading", "ready", "draining", "dead")

GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
REPLICA = ("model_name", "engine")

#: Values of the labels, and of the sample: a number, or a `Histogram`.
Samples = Iterable[tuple[list[str], Any]]


class Family(NamedTuple):
    """One family. `unit`: of a histogram, so many of its integers are 1. `exists`: whether it is there at all."""

    kind: Kind | type[HistogramMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[EngineMetrics], Samples]
    unit: int = 1
    exists: Callable[[EngineMetrics], bool] = lambda _: True

    def read(self, metrics: EngineMetrics) -> Metric:
        """The family with its samples of this moment."""
        family = self.kind(self.name, self.help, labels=self.labels)
        for labels, value in self.samples(metrics):
            if isinstance(family, HistogramMetricFamily):
                # Prometheus counts each bucket's values with those of all below it.
                bounds = [floatToGoString(bound / self.unit) for bound in value.bounds]
                buckets = list(zip([*bounds, "+Inf"], accumulate(value.counts), strict=True))
                family.add_metric(labels, buckets, value.total / self.unit)
            else:
                family.add_metric(labels, value)
        return family


def _replica(kind: Kind, name: str, text: str, value: Callable[[ReplicaMetrics], float]) -> Family:
    return Family(kind, name, text, REPLICA, lambda m: ((labels, value(r)) for labels, r in _replicas(m)))


def _replica_by(
    kind: Kind, name: str, text: str, label: str, values: Callable[[ReplicaMetrics], Mapping[str, float]]
) -> Family:
    def samples(metrics: EngineMetrics) -> Samples:
        for labels, replica in _replicas(metrics):
            for key, value in sorted(values(replica).items()):
                yield [*labels, key], value

    return Family(kind, name, text, (*REPLICA, label), samples)


def _replica_histogram(declared: HistogramFamily) -> Family:
    return Family(
        HistogramMetricFamily,
        declared.name,
        declared.help,
        REPLICA,
        lambda m: ((labels, replica.histograms[declared.key]) for labels, replica in _replicas(m)),
        unit=NANOSECONDS_PER_SECOND if declared.is_time else 1,
    )


def _class(name: str, text: str, value: Callable[[ClassMetrics], float]) -> Family:
    """Over all replicas: a class does not belong to one. Requests without a class are in none."""
    labels = ("service_class",)
    return Family(COUNTER, name, text, labels, lambda m: (([key], value(each)) for key, each in m.log.classes.items()))


def _class_seconds(name: str, text: str, histogram: Callable[[ClassMetrics], Histogram]) -> Family:
    def samples(metrics: EngineMetrics) -> Samples:
        return (([key], histogram(each)) for key, each in metrics.log.classes.items())

    return Family(HistogramMetricFamily, name, text, ("service_class",), samples, unit=NANOSECONDS_PER_SECOND)


def _engine(name: str, text: str, value: Callable[[EngineMetrics], float]) -> Family:
    return Family(COUNTER, name, text, (), lambda m: [([], value(m))])


def _recorder(kind: Kind, name: str, text: str, value: Callable[[RecorderMetrics], float]) -> Family:
    """Nothing where there is no record."""

    def samples(metrics: EngineMetrics) -> Samples:
        return [] if metrics.recorder is None else [([], value(metrics.recorder))]

    return Family(kind, name, text, (), samples, exists=lambda m: m.recorder is not None)


def _front_end(kind: Kind, name: str, text: str, value: Callable[[FrontEndMetrics], float]) -> Family:
    """One sample for each process that serves HTTP; nothing where the engine's own process does."""

    def samples(metrics: EngineMetrics) -> Samples:
        return (([str(each.index)], value(each)) for each in metrics.front_ends)

    return Family(kind, name, text, ("front_end",), samples, exists=lambda m: bool(m.front_ends))


def _replicas(metrics: EngineMetrics) -> Iterator[tuple[list[str], ReplicaMetrics]]:
    return (([metrics.log.model, str(index)], replica) for index, replica in enumerate(metrics.log.replicas))


def _waiting(replica: ReplicaMetrics) -> Mapping[str, float]:
    return {
        "capacity": replica.num_waiting - replica.num_waiting_for_grammar,
        "deferred": replica.num_waiting_for_grammar,
    }


def _cache_usage(metrics: EngineMetrics) -> Samples:
    return ((labels, each.num_held_blocks / metrics.log.num_blocks) for labels, each in _replicas(metrics))


def _finished_reasons(replica: ReplicaMetrics) -> Mapping[str, float]:
    """By vLLM's reasons, also by those that no request has."""
    counts = dict.fromkeys(FINISHED_REASONS.values(), 0)
    for reason, count in replica.finish_reasons.items():
        counts[FINISHED_REASONS[reason]] += count
    return counts


def _op_seconds(replica: ReplicaMetrics) -> Mapping[str, float]:
    return {name: ns / NANOSECONDS_PER_SECOND for name, ns in replica.op_ns.items()}


def _rejections(metrics: EngineMetrics) -> Samples:
    """A rejection belongs to no replica and counts under the first; a reason without any is 0."""
    limited = {RATE_LIMITED: sum(metrics.rate_limited.values())}
    for labels, replica in _replicas(metrics):
        counts = dict.fromkeys(REJECT_REASONS, 0) | replica.reject_reasons | (limited if labels[1] == "0" else {})
        for reason, count in sorted(counts.items()):
            yield [*labels, reason], count


def _class_rejections(metrics: EngineMetrics) -> Samples:
    classes, limited = metrics.log.classes, metrics.rate_limited
    for name in sorted({*classes, *limited} - {""}):
        found = classes[name].reject_reasons if name in classes else {}
        counts = dict.fromkeys(REJECT_REASONS, 0) | found | {RATE_LIMITED: limited.get(name, 0)}
        for reason, count in sorted(counts.items()):
            yield [name, reason], count


def _http_requests(metrics: EngineMetrics) -> Samples:
    """Over all front ends."""
    counts: Counter[tuple[str, ...]] = Counter()
    for answered in (metrics.http_requests, *(each.http_requests for each in metrics.front_ends)):
        for *labels, count in answered:
            counts[tuple(map(str, labels))] += int(count)
    return [(list(labels), count) for labels, count in sorted(counts.items())]


FAMILIES: tuple[Family, ...] = (
    _replica(GAUGE, "vllm:num_requests_running", "Requests on a worker.", lambda r: r.num_running),
    _replica(GAUGE, "vllm:num_requests_waiting", "Requests that wait for a worker.", lambda r: r.num_waiting),
    _replica(GAUGE, "eventlm:replica_up", "1 while the replica has a worker.", lambda r: int(r.is_up)),
    _replica_by(GAUGE, "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", _waiting),
    Family(GAUGE, "vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", REPLICA, _cache_usage),
    _replica(COUNTER, "vllm:num_preemptions", "Preemptions.", lambda r: sum(r.preempt_reasons.values())),
    _replica(COUNTER, "vllm:prompt_tokens", "Prompt tokens of requests whose prompt is done.",
             lambda r: r.prompt_tokens),
    _replica(COUNTER, "vllm:prompt_tokens_cached", "Of those, tokens found in the prefix cache.",
             lambda r: r.cached_tokens),
    _replica(COUNTER, "vllm:generation_tokens", "Tokens generated.", lambda r: r.generation_tokens),
    _replica(COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
             lambda r: r.queried_tokens),
    _replica(COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda r: r.hit_tokens),
    _replica(COUNTER, "eventlm:deadlines_met", "First tokens within their deadline.", lambda r: r.num_deadlines_met),
    _replica(COUNTER, "eventlm:deadlines_missed", "First tokens too late or never.", lambda r: r.num_deadlines_missed),
    _replica(COUNTER, "eventlm:steps", "Completed steps.", lambda r: r.num_steps),
    _replica(COUNTER, "eventlm:step_busy_seconds", "Time in steps.", lambda r: r.busy_ns / NANOSECONDS_PER_SECOND),
    _replica(COUNTER, "eventlm:workers_lost", "Workers lost.", lambda r: r.num_workers_lost),
    _replica_by(COUNTER, "vllm:request_success", "Finished requests.", "finished_reason", _finished_reasons),
    _replica_by(COUNTER, "eventlm:sequences_finished", "Finished sequences, in eventlm's words.", "reason",
                lambda r: r.finish_reasons),
    _replica_by(COUNTER, "eventlm:preemptions", "Preemptions by cause.", "reason", lambda r: r.preempt_reasons),
    _replica_by(COUNTER, "eventlm:op_seconds", "Time of operations in workers (--profile-ops).", "op", _op_seconds),
    *map(_replica_histogram, HISTOGRAMS),
    _class("eventlm:class_requests", "Requests that arrived.", lambda c: c.num_requests),
    _class("eventlm:class_sequences_completed", "Sequences that ran to their end.", lambda c: c.num_complete),
    _class("eventlm:class_sequences_dropped", "Sequences ended because they were late.", lambda c: c.num_dropped),
    _class("eventlm:class_deadlines_met", "First tokens within their own deadline.", lambda c: c.num_deadlines_met),
    _class("eventlm:class_deadlines_missed", "First tokens too late or never.", lambda c: c.num_deadlines_missed),
    _class("eventlm:class_slo_met", "Sequences that met their objectives.", lambda c: c.num_slo_met),
    _class("eventlm:class_slo_missed", "Sequences that missed their objectives.", lambda c: c.num_slo_missed),
    _class("eventlm:class_generation_tokens", "Tokens generated.", lambda c: c.output_tokens),
    _class_seconds("eventlm:class_time_to_first_token_seconds", "Time to first token.", lambda c: c.ttft),
    _class_seconds("eventlm:class_queue_time_seconds", "Arrival to first launch.", lambda c: c.queue),
    _class_seconds("eventlm:class_e2e_latency_seconds", "Reception of a request to its end.", lambda c: c.e2e),
    Family(COUNTER, "vllm:admission_rejections", "Requests turned away.", (*REPLICA, "reason"), _rejections),
    Family(COUNTER, "eventlm:class_requests_rejected", "Requests turned away.", ("service_class", "reason"),
           _class_rejections),
    _engine("eventlm:events", "Events in the log.", lambda m: m.log.num_events),
    _engine("eventlm:requests", "Requests that arrived.", lambda m: m.log.num_requests),
    _engine("eventlm:plugin_failures", "Unusable answers of plug-ins.", lambda m: m.log.num_plugin_failures),
    Family(GAUGE, "eventlm:engine_state", "1 for the state the engine is in.", ("state",),
           lambda m: [([state], int(state == m.state)) for state in STATES]),
    _recorder(COUNTER, "eventlm:log_bytes", "Bytes written to the trace.", lambda r: r.num_bytes),
    _recorder(GAUGE, "eventlm:recorder_lag_events", "Events not written to the trace.", lambda r: r.num_events_behind),
    _recorder(GAUGE, "eventlm:recorder_writing", "0 while the trace cannot be written.", lambda r: int(r.is_writing)),
    Family(HistogramMetricFamily, "eventlm:scheduling_time_seconds",
           "Applying a tick's last fact, where plans are made, policy included.", (),
           lambda m: [([], m.scheduling_time)], unit=NANOSECONDS_PER_SECOND),
    _front_end(GAUGE, "eventlm:front_end_up", "1 while the front end has a process.", lambda f: int(f.is_up)),
    _front_end(GAUGE, "eventlm:front_end_requests", "Requests that generate.", lambda f: f.num_requests),
    _front_end(GAUGE, "eventlm:front_end_memory_bytes", "Resident memory.", lambda f: f.resident_bytes),
    _front_end(COUNTER, "eventlm:front_end_cpu_seconds", "Processor time.",
               lambda f: f.cpu_ns / NANOSECONDS_PER_SECOND),
    _front_end(COUNTER, "eventlm:front_end_restarts", "Restarted processes.", lambda f: f.num_restarts),
    # As prometheus-fastapi-instrumentator, which vLLM uses, names and labels it.
    Family(COUNTER, "http_requests", "Total number of requests by method, status and handler.",
           ("handler", "method", "status"), _http_requests),
)  # fmt: skip


def families(metrics: EngineMetrics) -> Iterator[Metric]:
    """The families of one moment's figures, each made when it is asked for."""
    return (family.read(metrics) for family in FAMILIES if family.exists(metrics))
