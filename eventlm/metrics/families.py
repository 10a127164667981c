"""The families of /metrics, each declared once: kind, name, help, labels and where its samples come from.

Names, labels and buckets are vLLM's; `eventlm:` has what only eventlm has. Labels are `model_name` and `engine`, the
number of the replica. A "request" in vLLM's names is one sequence: each of a request's `n` samples counts. What belongs
to no replica yet counts under the first one of its model, so that sums are right.

All other servers of one model are one `engine` together, because there may be a thousand of them, and several families
with the label `backend` tell them apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from eventlm.core.shards import Layout
from eventlm.metrics.aggregates import ClassMetrics, ReplicaMetrics
from eventlm.metrics.backend_families import BACKEND_FAMILIES, reported_usage
from eventlm.metrics.components import EngineMetrics, FrontEndMetrics, RecorderMetrics, SpanExportMetrics, added
from eventlm.metrics.family import COUNTER, GAUGE, HISTOGRAM, SUMMARY, Family, Samples, Scope
from eventlm.metrics.histograms import HISTOGRAMS, HistogramFamily

#: vLLM's finish reasons by ours.
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
#: Why requests are turned away. Those that a key's limit refuses are not in the log.
RATE_LIMITED = "rate_limit"
REJECT_REASONS = ("queue_full", "context_length", RATE_LIMITED)
#: Why spans are dropped, each with a count of 0.
SPAN_DROPS = {"queue_full": 0, "refused": 0, "not_sent": 0}
STATES = ("loading", "ready", "draining", "dead")


def _replicas(metrics: EngineMetrics) -> Iterator[tuple[list[str], ReplicaMetrics]]:
    return (([of_set.model, str(index)], replica) for of_set, index, replica in metrics.log.engines)


class _Part(NamedTuple):
    """A stage or a KV group of a replica, by its number."""

    number: int
    of: ReplicaMetrics


def _stages(metrics: EngineMetrics) -> Iterator[tuple[list[str], _Part]]:
    for labels, replica in _replicas(metrics):
        yield from (([*labels, str(stage)], _Part(stage, replica)) for stage in range(len(replica.stage_busy_ns)))


def _kv_groups(metrics: EngineMetrics) -> Iterator[tuple[list[str], _Part]]:
    for labels, replica in _replicas(metrics):
        yield from (([*labels, str(group)], _Part(group, replica)) for group in range(len(replica.group_tokens)))


def _split(metrics: EngineMetrics) -> Iterator[tuple[list[str], Layout, ReplicaMetrics]]:
    """Replicas of several ranks."""
    for labels, replica in _replicas(metrics):
        layout = metrics.log.set_of(int(labels[1])).layout
        if layout.num_ranks > 1:
            yield labels, layout, replica


REPLICA = ("model_name", "engine")
HTTP = ("handler", "method", "status")
_replica = Scope(REPLICA, _replicas)
_stage = Scope((*REPLICA, "stage"), _stages, is_optional=True)
_kv_group = Scope((*REPLICA, "kv_group"), _kv_groups, is_optional=True)
#: Over all replicas. Requests without a class count nowhere.
_class = Scope[ClassMetrics](("service_class",), lambda m: (([key], each) for key, each in m.log.classes.items()))
_engine = Scope[EngineMetrics]((), lambda m: [([], m)])
_recorder = Scope[RecorderMetrics]((), lambda m: [] if m.recorder is None else [([], m.recorder)], is_optional=True)
_spans = Scope[SpanExportMetrics](
    (), lambda m: [] if m.span_export is None else [([], m.span_export)], is_optional=True
)
#: Processes that serve HTTP; none if the engine's own process does.
_front_end = Scope[FrontEndMetrics](
    ("front_end",), lambda m: (([str(each.index)], each) for each in m.front_ends), is_optional=True
)


def _histogram(declared: HistogramFamily) -> Family:
    return _replica(HISTOGRAM, declared.name, declared.help, lambda r: r.histograms[declared.key])


def _waiting(replica: ReplicaMetrics) -> Mapping[str, float]:
    return {
        "capacity": replica.num_waiting - replica.num_waiting_for_grammar,
        "deferred": replica.num_waiting_for_grammar,
    }


def _prompt_sources(replica: ReplicaMetrics) -> Mapping[str, float]:
    """Where prompt tokens came from, in vLLM's words."""
    return {
        "local_compute": replica.prompt_tokens - replica.cached_tokens,
        "local_cache_hit": replica.cached_tokens,
        "external_kv_transfer": 0,
    }


def _cache_info(metrics: EngineMetrics) -> Samples:
    """vLLM spells values as Python does."""
    if metrics.cache is None:
        return
    firsts = [each.first for each in metrics.log.others]
    caches = [metrics.cache, *metrics.other_caches]
    for labels, _ in _replicas(metrics):
        if metrics.log.set_of(int(labels[1])).forwards:
            continue
        cache = caches[bisect_right(firsts, int(labels[1]))]
        values = (
            str(cache.block_size),
            str(cache.num_blocks),
            str(cache.block_size * cache.num_blocks),
            cache.dtype,
            str(cache.prefix_cache),
            cache.gpu_memory_utilization,
        )
        yield [*labels, *values], 1


def _layout_info(metrics: EngineMetrics) -> Samples:
    for labels, layout, _ in _split(metrics):
        yield [*labels, str(layout.tensor), str(layout.stages), str(layout.groups)], 1


def _ranks_up(metrics: EngineMetrics) -> Samples:
    for labels, layout, replica in _split(metrics):
        yield labels, layout.num_ranks if replica.is_up else 0


def _cache_usage(metrics: EngineMetrics) -> Samples:
    """Of other servers the mean of what they say, if they do."""
    for labels, each in _replicas(metrics):
        of_set = metrics.log.set_of(int(labels[1]))
        if not of_set.forwards:
            yield labels, each.num_held_blocks / of_set.num_blocks
        elif said := [share for (model, _), share in reported_usage(metrics) if model == of_set.model]:
            yield labels, sum(said) / len(said)


def _finished_reasons(replica: ReplicaMetrics) -> Mapping[str, float]:
    """By vLLM's reasons, including those with a count of 0."""
    counts = dict.fromkeys(FINISHED_REASONS.values(), 0)
    for reason, count in replica.finish_reasons.items():
        counts[FINISHED_REASONS[reason]] += count
    return counts


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


def _http_times(metrics: EngineMetrics) -> Samples:
    """Count and time of HTTP requests, over all front ends."""
    sums = added(metrics.http_requests, *(each.http_requests for each in metrics.front_ends))
    return [(list(labels), (count, total_ns)) for *labels, count, total_ns in sums]


def _http_requests(metrics: EngineMetrics) -> Samples:
    return [(labels, count) for labels, (count, _) in _http_times(metrics)]


FAMILIES: tuple[Family, ...] = (
    _replica(GAUGE, "vllm:num_requests_running", "Requests on a worker, or forwarded.", lambda r: r.num_running),
    _replica(GAUGE, "vllm:num_requests_waiting", "Requests that wait for a worker.", lambda r: r.num_waiting),
    _replica(GAUGE, "eventlm:replica_up", "1 while the replica has a worker, or a backend is up.",
             lambda r: int(r.is_up)),
    Family(GAUGE, "eventlm:ranks_up", "Ranks of the replica, 0 while it has none; of several only.", REPLICA, _ranks_up,
           is_optional=True),
    Family(GAUGE, "eventlm:parallel_config_info", "How the replica is split into ranks, if it is; always 1.",
           (*REPLICA, "tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size"), _layout_info,
           is_optional=True),
    _replica(GAUGE, "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", _waiting, by="reason"),
    Family(GAUGE, "vllm:kv_cache_usage_perc", "KV blocks in use, 1 is all.", REPLICA, _cache_usage),
    Family(GAUGE, "vllm:cache_config_info", "How the KV cache is configured; always 1.",
           (*REPLICA, "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "cache_dtype", "enable_prefix_caching",
            "gpu_memory_utilization"), _cache_info, is_optional=True),
    _replica(GAUGE, "vllm:engine_sleep_state", "Always awake.",
             lambda r: {"awake": 1, "weights_offloaded": 0, "discard_all": 0}, by="sleep_state"),
    _replica(COUNTER, "vllm:num_preemptions", "Preemptions.", lambda r: sum(r.preempt_reasons.values())),
    _replica(COUNTER, "vllm:prompt_tokens", "Prompt tokens of requests whose prompt is done.",
             lambda r: r.prompt_tokens),
    _replica(COUNTER, "vllm:prompt_tokens_cached", "Of those, tokens found in the prefix cache.",
             lambda r: r.cached_tokens),
    _replica(COUNTER, "vllm:prompt_tokens_by_source", "The same by where they came from.",
             _prompt_sources, by="source"),
    _replica(COUNTER, "vllm:prompt_tokens_cached_by_source", "Those found in the prefix cache, by where that is.",
             lambda r: {"device": r.cached_tokens}, by="source"),
    _replica(COUNTER, "vllm:generation_tokens", "Tokens generated.", lambda r: r.generation_tokens),
    _replica(COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
             lambda r: r.queried_tokens),
    _replica(COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda r: r.hit_tokens),
    _replica(COUNTER, "eventlm:deadlines_met", "First tokens within their deadline.", lambda r: r.num_deadlines_met),
    _replica(COUNTER, "eventlm:deadlines_missed", "First tokens too late or never.", lambda r: r.num_deadlines_missed),
    _replica(COUNTER, "eventlm:steps", "Completed steps.", lambda r: r.num_steps),
    _replica(COUNTER, "eventlm:step_busy_seconds", "Time in steps.", lambda r: r.busy_ns),
    _stage(COUNTER, "eventlm:stage_busy_seconds", "Time of each stage of a pipeline in steps.",
           lambda s: s.of.stage_busy_ns[s.number]),
    _stage(COUNTER, "eventlm:stage_wait_seconds", "Time of steps before a stage that computed others.",
           lambda s: s.of.stage_wait_ns[s.number]),
    _stage(COUNTER, "eventlm:stage_exchange_seconds", "Time of steps on their way to a stage.",
           lambda s: s.of.stage_exchange_ns[s.number]),
    _kv_group(GAUGE, "eventlm:kv_group_blocks_used", "KV blocks in use of each KV group.",
              lambda g: g.of.group_held_blocks[g.number]),
    _kv_group(COUNTER, "eventlm:kv_group_tokens", "Tokens that each KV group computed.",
              lambda g: g.of.group_tokens[g.number]),
    _replica(COUNTER, "eventlm:workers_lost", "Workers lost.", lambda r: r.num_workers_lost),
    _replica(COUNTER, "vllm:request_success", "Finished requests.", _finished_reasons, by="finished_reason"),
    _replica(COUNTER, "eventlm:sequences_finished", "Finished sequences, in eventlm's words.",
             lambda r: r.finish_reasons, by="reason"),
    _replica(COUNTER, "eventlm:preemptions", "Preemptions by cause.", lambda r: r.preempt_reasons, by="reason"),
    _replica(COUNTER, "eventlm:op_seconds", "Time of operations in workers (--profile-ops).",
             lambda r: r.op_ns, by="op"),
    *(_histogram(each) for each in HISTOGRAMS),
    *BACKEND_FAMILIES,
    _class(COUNTER, "eventlm:class_requests", "Requests that arrived.", lambda c: c.num_requests),
    _class(COUNTER, "eventlm:class_sequences_completed", "Sequences that ran to their end.", lambda c: c.num_complete),
    _class(COUNTER, "eventlm:class_sequences_dropped", "Sequences ended because they were late.",
           lambda c: c.num_dropped),
    _class(COUNTER, "eventlm:class_deadlines_met", "First tokens within their own deadline.",
           lambda c: c.num_deadlines_met),
    _class(COUNTER, "eventlm:class_deadlines_missed", "First tokens too late or never.",
           lambda c: c.num_deadlines_missed),
    _class(COUNTER, "eventlm:class_slo_met", "Sequences that met their objectives.", lambda c: c.num_slo_met),
    _class(COUNTER, "eventlm:class_slo_missed", "Sequences that missed their objectives.", lambda c: c.num_slo_missed),
    _class(COUNTER, "eventlm:class_generation_tokens", "Tokens generated.", lambda c: c.output_tokens),
    _class(HISTOGRAM, "eventlm:class_time_to_first_token_seconds", "Time to first token.", lambda c: c.ttft),
    _class(HISTOGRAM, "eventlm:class_queue_time_seconds", "Arrival to first launch.", lambda c: c.queue),
    _class(HISTOGRAM, "eventlm:class_e2e_latency_seconds", "Reception of a request to its end.", lambda c: c.e2e),
    Family(COUNTER, "vllm:admission_rejections", "Requests turned away.", (*REPLICA, "reason"), _rejections),
    Family(COUNTER, "eventlm:class_requests_rejected", "Requests turned away.", ("service_class", "reason"),
           _class_rejections),
    _engine(COUNTER, "eventlm:events", "Events in the log.", lambda m: m.log.num_events),
    _engine(COUNTER, "eventlm:requests", "Requests that arrived.", lambda m: m.log.num_requests),
    _engine(COUNTER, "eventlm:plugin_failures", "Unusable answers of plug-ins.", lambda m: m.log.num_plugin_failures),
    _engine(GAUGE, "eventlm:engine_state", "1 for the state the engine is in.",
            lambda m: {state: int(state == m.state) for state in STATES}, by="state"),
    _engine(COUNTER, "eventlm:recoveries", "Engines that another one has followed.",
            lambda m: m.num_recoveries),
    _engine(GAUGE, "eventlm:engine_paused", "1 while an operator has paused launches.", lambda m: int(m.paused)),
    _engine(GAUGE, "eventlm:replicas_waiting_for_room", "Replicas that wait for room for their workers.",
            lambda m: m.num_waiting_for_room),
    _recorder(COUNTER, "eventlm:log_bytes", "Bytes written to the trace.", lambda r: r.num_bytes),
    _recorder(GAUGE, "eventlm:recorder_lag_events", "Events not written to the trace.", lambda r: r.num_events_behind),
    _recorder(GAUGE, "eventlm:recorder_writing", "0 while the trace cannot be written.", lambda r: int(r.is_writing)),
    _recorder(HISTOGRAM, "eventlm:recorder_sync_time_seconds", "Syncing what was written of the trace.",
              lambda r: r.sync_time),
    _spans(GAUGE, "eventlm:otlp_up", "1 while the process that exports spans runs.", lambda e: int(e.is_up)),
    _spans(GAUGE, "eventlm:otlp_spans_waiting", "Spans that wait to be sent.", lambda e: e.num_waiting),
    _spans(GAUGE, "eventlm:otlp_lag_events", "Events of which no spans are made yet.", lambda e: e.num_events_behind),
    _spans(COUNTER, "eventlm:otlp_spans_sent", "Spans that the endpoint has taken.", lambda e: e.num_sent),
    _spans(COUNTER, "eventlm:otlp_spans_dropped", "Spans that were given up.", lambda e: SPAN_DROPS | e.num_dropped,
           by="reason"),
    _spans(COUNTER, "eventlm:otlp_posts_failed", "Posts to the endpoint that failed.", lambda e: e.num_failures),
    _spans(COUNTER, "eventlm:otlp_restarts", "Restarts of that process.", lambda e: e.num_restarts),
    _engine(HISTOGRAM, "eventlm:scheduling_time_seconds",
            "Applying a tick's last fact, where plans are made, policy included.", lambda m: m.scheduling_time),
    _front_end(GAUGE, "eventlm:front_end_up", "1 while the front end has a process.", lambda f: int(f.is_up)),
    _front_end(GAUGE, "eventlm:front_end_requests", "Requests that generate.", lambda f: f.num_requests),
    _front_end(GAUGE, "eventlm:front_end_memory_bytes", "Resident memory.", lambda f: f.resident_bytes),
    _front_end(COUNTER, "eventlm:front_end_cpu_seconds", "Processor time.", lambda f: f.cpu_ns),
    _front_end(COUNTER, "eventlm:front_end_restarts", "Restarted processes.", lambda f: f.num_restarts),
    # As prometheus-fastapi-instrumentator, which vLLM uses, names and labels it.
    Family(COUNTER, "http_requests", "Total number of requests by method, status and handler.",
           HTTP, _http_requests),
    Family(SUMMARY, "http_request_duration_seconds", "Time of requests, streams to their end.", HTTP, _http_times),
)  # fmt: skip


def families(metrics: EngineMetrics) -> Iterator[Metric]:
    """The families of one moment's figures, each made when it is asked for."""
    for family in FAMILIES:
        found = family.read(metrics)
        if found.samples or not family.is_optional:
            yield found
