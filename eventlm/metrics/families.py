"""The engine's figures as Prometheus metrics: vLLM's names, labels and buckets; `eventlm:` for what only it has.

Labels are `model_name` and `engine`, which is the replica's number. A "request" in vLLM's names is one sequence: each
of a request's `n` samples counts, as there. What no replica has yet stands under engine 0, so that sums are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from eventlm.metrics.aggregates import ClassMetrics, Histogram, MetricsSnapshot, ReplicaMetrics
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics
from eventlm.types import NANOSECONDS_PER_SECOND

LABELS = ("model_name", "engine")
FRONT_END_LABELS = ("front_end",)
HTTP_LABELS = ("handler", "method", "status")

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

#: Histograms of seconds: name, what it is called in the store, help.
SECONDS = (
    ("vllm:time_to_first_token_seconds", "prefill_e2e_time", "Time to first token."),
    (
        "vllm:inter_token_latency_seconds",
        "decode_token_execution_plus_preemption_time",
        "Time between two outputs of a request.",
    ),
    ("vllm:request_time_per_output_token_seconds", "request_time_per_output_token", "Mean time per output token."),
    ("vllm:e2e_request_latency_seconds", "request_e2e_time", "Reception of a request to its end."),
    ("vllm:request_queue_time_seconds", "request_scheduling_delay", "Arrival to first launch."),
    ("vllm:request_prefill_time_seconds", "request_prefill_time", "First launch to first token."),
    ("vllm:request_decode_time_seconds", "request_decode_time", "First token to last."),
    ("vllm:request_inference_time_seconds", "request_inference_time", "First launch to last token."),
    ("eventlm:request_execution_time_seconds", "request_execution_time", "Time in which a request held blocks."),
    ("eventlm:request_preemption_time_seconds", "request_preemption_time", "Time waited behind preemptions."),
    ("eventlm:batch_execution_time_seconds", "batch_execution_time", "A step, by the worker's clock."),
    ("eventlm:inter_batch_delay_seconds", "inter_batch_delay", "Pause between two steps with work at hand."),
    ("eventlm:deadline_slack_seconds", "deadline_slack", "What was left of a deadline at the first token."),
)
#: Histograms of counts.
COUNTS = (
    ("vllm:request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request."),
    ("vllm:request_generation_tokens", "request_generation_tokens", "Output tokens of a request."),
    (
        "vllm:request_max_num_generation_tokens",
        "request_max_num_generation_tokens",
        "Output tokens of the longest of a request's samples.",
    ),
    ("vllm:iteration_tokens_total", "batch_num_tokens", "Tokens computed in a step."),
    ("vllm:request_num_preemptions", "request_num_preemptions", "Preemptions of a request."),
    ("eventlm:request_num_restarts", "request_num_restarts", "Prefills of a request begun anew."),
    ("eventlm:batch_size", "batch_size", "Sequences in a step."),
)
#: Gauges and counters of one number a replica.
GAUGES: tuple[tuple[str, str, Callable[[ReplicaMetrics], float]], ...] = (
    ("vllm:num_requests_running", "Requests on a worker.", lambda r: r.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for a worker.", lambda r: r.num_waiting),
    ("eventlm:replica_up", "1 while the replica has a worker.", lambda r: int(r.is_up)),
)
COUNTERS: tuple[tuple[str, str, Callable[[ReplicaMetrics], float]], ...] = (
    ("vllm:num_preemptions", "Preemptions.", lambda r: sum(r.preempt_reasons.values())),
    ("vllm:prompt_tokens", "Prompt tokens of requests whose prompt is done.", lambda r: r.prompt_tokens),
    ("vllm:prompt_tokens_cached", "Those of them found in the prefix cache.", lambda r: r.cached_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda r: r.generation_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda r: r.queried_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda r: r.hit_tokens),
    ("eventlm:deadlines_met", "First tokens within their deadline.", lambda r: r.num_deadlines_met),
    ("eventlm:deadlines_missed", "First tokens too late or never.", lambda r: r.num_deadlines_missed),
    ("eventlm:steps", "Completed steps.", lambda r: r.num_steps),
    ("eventlm:step_busy_seconds", "Time in steps.", lambda r: r.busy_ns / NANOSECONDS_PER_SECOND),
    ("eventlm:workers_lost", "Workers lost.", lambda r: r.num_workers_lost),
)
#: Counters with one label more: name, help, label, its values.
BY_REASON: tuple[tuple[str, str, str, Callable[[ReplicaMetrics], Mapping[str, float]]], ...] = (
    ("vllm:request_success", "Finished requests.", "finished_reason", lambda r: _finished_reasons(r)),
    ("eventlm:sequences_finished", "Finished sequences, in eventlm's words.", "reason", lambda r: r.finish_reasons),
    ("eventlm:preemptions", "Preemptions by cause.", "reason", lambda r: r.preempt_reasons),
    ("eventlm:op_seconds", "Time of operations in workers (--profile-ops).", "op", lambda r: _op_seconds(r)),
)

#: Why requests are turned away. The log has those that arrived; whom a key's limit refuses never does.
RATE_LIMITED = "rate_limit"
REJECT_REASONS = ("queue_full", "context_length", RATE_LIMITED)

#: By service class; requests without one are in none.
CLASS_LABEL = "service_class"
CLASS_COUNTERS: tuple[tuple[str, str, Callable[[ClassMetrics], float]], ...] = (
    ("eventlm:class_requests", "Requests that arrived.", lambda c: c.num_requests),
    ("eventlm:class_sequences_completed", "Sequences that ran to their end.", lambda c: c.num_complete),
    ("eventlm:class_sequences_dropped", "Sequences ended for they were late.", lambda c: c.num_dropped),
    ("eventlm:class_deadlines_met", "First tokens within their own deadline.", lambda c: c.num_deadlines_met),
    ("eventlm:class_deadlines_missed", "First tokens too late or never.", lambda c: c.num_deadlines_missed),
    ("eventlm:class_slo_met", "Sequences that met their objectives.", lambda c: c.num_slo_met),
    ("eventlm:class_slo_missed", "Sequences that did not.", lambda c: c.num_slo_missed),
    ("eventlm:class_generation_tokens", "Tokens generated.", lambda c: c.output_tokens),
)
CLASS_SECONDS: tuple[tuple[str, str, Callable[[ClassMetrics], Histogram]], ...] = (
    ("eventlm:class_time_to_first_token_seconds", "Time to first token.", lambda c: c.ttft),
    ("eventlm:class_queue_time_seconds", "Arrival to first launch.", lambda c: c.queue),
    ("eventlm:class_e2e_latency_seconds", "Reception of a request to its end.", lambda c: c.e2e),
)


class EngineCollector:
    """A prometheus_client collector over what `read` returns at the scrape."""

    def __init__(self, read: Callable[[], EngineMetrics]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families, each made when it is asked for, of one moment's figures."""
        return families(self._read())


def families(metrics: EngineMetrics) -> Iterator[Metric]:
    """All families, one by one."""
    log = metrics.log
    yield from _replica_families(log)
    yield from _class_families(log)
    yield from _rejections(log, metrics.rate_limited)
    yield from _engine_families(metrics)
    yield from _front_end_families(metrics.front_ends)
    yield _http_requests(metrics)


def _replica_families(log: MetricsSnapshot) -> Iterator[Metric]:
    labelled = [([log.model, str(index)], replica) for index, replica in enumerate(log.replicas)]
    for name, text, value in GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        for labels, replica in labelled:
            gauge.add_metric(labels, value(replica))
        yield gauge
    waiting = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Why they wait.", labels=(*LABELS, "reason"))
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", labels=LABELS)
    for labels, replica in labelled:
        waiting.add_metric([*labels, "capacity"], replica.num_waiting - replica.num_waiting_for_grammar)
        waiting.add_metric([*labels, "deferred"], replica.num_waiting_for_grammar)
        usage.add_metric(labels, replica.num_held_blocks / log.num_blocks)
    yield waiting
    yield usage
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        for labels, replica in labelled:
            counter.add_metric(labels, value(replica))
        yield counter
    for name, text, label, values in BY_REASON:
        counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for labels, replica in labelled:
            for reason, count in sorted(values(replica).items()):
                counter.add_metric([*labels, reason], count)
        yield counter
    for rows, unit in ((SECONDS, NANOSECONDS_PER_SECOND), (COUNTS, 1)):
        for name, key, text in rows:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, replica in labelled:
                _add_histogram(family, labels, replica.histograms[key], unit)
            yield family


def _class_families(log: MetricsSnapshot) -> Iterator[Metric]:
    """Over all replicas: a class is not of one."""
    for name, text, value in CLASS_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=(CLASS_LABEL,))
        for service_class, metrics in log.classes.items():
            counter.add_metric([service_class], value(metrics))
        yield counter
    for name, text, histogram in CLASS_SECONDS:
        family = HistogramMetricFamily(name, text, labels=(CLASS_LABEL,))
        for service_class, metrics in log.classes.items():
            _add_histogram(family, [service_class], histogram(metrics), NANOSECONDS_PER_SECOND)
        yield family


def _rejections(log: MetricsSnapshot, rate_limited: Mapping[str, int]) -> Iterator[Metric]:
    """A rejection is of no replica, and is counted under the first; a reason that nobody met is 0."""
    counter = CounterMetricFamily("vllm:admission_rejections", "Requests turned away.", labels=(*LABELS, "reason"))
    limited = {RATE_LIMITED: sum(rate_limited.values())}
    for index, replica in enumerate(log.replicas):
        counts = dict.fromkeys(REJECT_REASONS, 0) | replica.reject_reasons | (limited if index == 0 else {})
        for reason, count in sorted(counts.items()):
            counter.add_metric([log.model, str(index), reason], count)
    yield counter
    by_class = CounterMetricFamily(
        "eventlm:class_requests_rejected", "Requests turned away.", labels=(CLASS_LABEL, "reason")
    )
    for name in sorted({*log.classes, *rate_limited} - {""}):
        found = log.classes[name].reject_reasons if name in log.classes else {}
        counts = dict.fromkeys(REJECT_REASONS, 0) | found | {RATE_LIMITED: rate_limited.get(name, 0)}
        for reason, count in sorted(counts.items()):
            by_class.add_metric([name, reason], count)
    yield by_class


def _engine_families(metrics: EngineMetrics) -> Iterator[Metric]:
    log = metrics.log
    yield CounterMetricFamily("eventlm:events", "Events in the log.", value=log.num_events)
    yield CounterMetricFamily("eventlm:requests", "Requests that arrived.", value=log.num_requests)
    yield CounterMetricFamily("eventlm:plugin_failures", "Answers of plug-ins not used.", value=log.num_plugin_failures)
    state = GaugeMetricFamily("eventlm:engine_state", "1 for the state the engine is in.", labels=("state",))
    for name in ("loading", "ready", "draining", "dead"):
        state.add_metric([name], int(name == metrics.state))
    yield state
    recorder = metrics.recorder
    if recorder is not None:
        yield CounterMetricFamily("eventlm:log_bytes", "Bytes written to the trace.", value=recorder.num_bytes)
        behind, writing = recorder.num_events_behind, int(recorder.is_writing)
        yield GaugeMetricFamily("eventlm:recorder_lag_events", "Events not written to the trace.", value=behind)
        yield GaugeMetricFamily("eventlm:recorder_writing", "0 while the trace cannot be written.", value=writing)
    scheduling = HistogramMetricFamily(
        "eventlm:scheduling_time_seconds", "Applying a tick's last fact, where plans are made, policy included."
    )
    _add_histogram(scheduling, [], metrics.scheduling_time, NANOSECONDS_PER_SECOND)
    yield scheduling


def _front_end_families(front_ends: list[FrontEndMetrics]) -> Iterator[Metric]:
    """One figure of each process that speaks HTTP; nothing where the engine's own does."""
    if not front_ends:
        return
    up = GaugeMetricFamily("eventlm:front_end_up", "1 while the front end has a process.", labels=FRONT_END_LABELS)
    requests = GaugeMetricFamily("eventlm:front_end_requests", "Requests that generate.", labels=FRONT_END_LABELS)
    memory = GaugeMetricFamily("eventlm:front_end_memory_bytes", "Resident memory.", labels=FRONT_END_LABELS)
    cpu = CounterMetricFamily("eventlm:front_end_cpu_seconds", "Processor time.", labels=FRONT_END_LABELS)
    restarts = CounterMetricFamily("eventlm:front_end_restarts", "Processes begun anew.", labels=FRONT_END_LABELS)
    for front_end in front_ends:
        labels = [str(front_end.index)]
        up.add_metric(labels, int(front_end.is_up))
        requests.add_metric(labels, front_end.num_requests)
        memory.add_metric(labels, front_end.resident_bytes)
        cpu.add_metric(labels, front_end.cpu_ns / NANOSECONDS_PER_SECOND)
        restarts.add_metric(labels, front_end.num_restarts)
    yield from (up, requests, memory, cpu, restarts)


def _http_requests(metrics: EngineMetrics) -> Metric:
    """As prometheus-fastapi-instrumentator, which vLLM uses, names and labels it; over all front ends."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for answered in (metrics.http_requests, *(each.http_requests for each in metrics.front_ends)):
        for handler, method, status, count in answered:
            counts[handler, method, status] += count
    family = CounterMetricFamily(
        "http_requests", "Total number of requests by method, status and handler.", labels=HTTP_LABELS
    )
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram, unit: int) -> None:
    """Prometheus counts each bucket's values with those of all below it."""
    bounds = [floatToGoString(bound / unit) for bound in histogram.bounds]
    buckets = list(zip([*bounds, "+Inf"], accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets, histogram.total / unit)


def _finished_reasons(replica: ReplicaMetrics) -> Mapping[str, float]:
    """By vLLM's reasons, those with no request too."""
    counts = dict.fromkeys(FINISHED_REASONS.values(), 0)
    for reason, count in replica.finish_reasons.items():
        counts[FINISHED_REASONS[reason]] += count
    return counts


def _op_seconds(replica: ReplicaMetrics) -> Mapping[str, float]:
    return {name: ns / NANOSECONDS_PER_SECOND for name, ns in replica.op_ns.items()}
