"""A dashboard for Grafana 9 and later: its panels, their queries, and where they stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from eventlm.monitoring.queries import Queries

#: Of Grafana's grid, which is 24 wide.
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
#: Of the JSON model.
_SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: Queries over what the reader has chosen, at the resolution of the picture.
_SHOWN = Queries('job="$job", instance=~"$instance"', "$__rate_interval")


class Panel(NamedTuple):
    """A chart. queries: expressions and what their lines are called. unit: as Grafana names it."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]
    is_stacked: bool = False


class PanelRow(NamedTuple):
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


def panel_rows() -> list[PanelRow]:
    """All panels, in their order."""
    gauge, rate, mean = _SHOWN.gauge, _SHOWN.rate, _SHOWN.mean
    replica, service = ("instance", "engine"), ("service_class",)
    front_end = ("instance", "front_end")
    of_replica, of_front_end = "{{instance}} {{engine}}", "{{instance}} {{front_end}}"
    backend = ("backend",)
    prompt, cached = (rate(f"eventlm:backend_prompt_tokens{part}", by=backend) for part in ("", "_cached"))
    met, missed = rate("eventlm:deadlines_met"), rate("eventlm:deadlines_missed")
    class_met, class_missed = (rate(f"eventlm:class_slo_{each}", by=service) for each in ("met", "missed"))
    hits, queries = rate("vllm:prefix_cache_hits"), rate("vllm:prefix_cache_queries")
    return [
        PanelRow("Load", [
            Panel("Requests", "Sequences on workers or backends, and sequences that wait.", "short",
                  [(gauge("vllm:num_requests_running"), "running"), (gauge("vllm:num_requests_waiting"), "waiting")],
                  is_stacked=True),
            Panel("Tokens per second", "Prompt tokens whose prompt is done, of them those from the cache, and output.",
                  "short", [(rate("vllm:generation_tokens"), "output"), (rate("vllm:prompt_tokens"), "prompt"),
                            (rate("vllm:prompt_tokens_cached"), "prompt, cached")]),
            Panel("Ends per second", "By reason, in eventlm's words.", "short",
                  [(rate("eventlm:sequences_finished", by=("reason",)), "{{reason}}")], is_stacked=True),
            Panel("Refusals per second", "Requests that are not admitted, by reason.", "short",
                  [(rate("vllm:admission_rejections", by=("reason",)), "{{reason}}")]),
            Panel("HTTP requests per second", "By handler and class of status.", "short",
                  [(rate("http_requests", by=("handler", "status")), "{{handler}} {{status}}")]),
            Panel("Mean time of HTTP requests", "Streams to their end.", "s",
                  [(mean("http_request_duration_seconds", by=("handler",)), "{{handler}}")]),
        ]),
        PanelRow("Latency", [
            _quantiles("Time to first token", "From the reception of a request.", "vllm:time_to_first_token_seconds"),
            _quantiles("Time between tokens", "Between two outputs of a request.",
                       "vllm:inter_token_latency_seconds"),
            _quantiles("Time in the queue", "From the arrival to the first step.",
                       "vllm:request_queue_time_seconds"),
            _quantiles("Whole requests", "From the reception to the end.", "vllm:e2e_request_latency_seconds"),
            Panel("Where the time goes", "Means: queue, prompt, decoding, and waits after preemptions.", "s",
                  [(mean(name), line) for line, name in (
                      ("queue", "vllm:request_queue_time_seconds"), ("prefill", "vllm:request_prefill_time_seconds"),
                      ("decode", "vllm:request_decode_time_seconds"),
                      ("preempted", "eventlm:request_preemption_time_seconds"))], is_stacked=True),
            _quantiles("First tokens before deadlines", "What was left of the deadline; negative: too late.",
                       "eventlm:deadline_slack_seconds"),
        ]),
        PanelRow("Memory", [
            Panel("KV blocks in use", "Of each replica.", "percentunit",
                  [(gauge("vllm:kv_cache_usage_perc", by=replica), of_replica)]),
            Panel("Prefix cache hits", "Of the prompt tokens that are looked up.", "percentunit",
                  [(f"{hits} / ({queries} > 0)", "hits")]),
            Panel("Preemptions per second", "Sequences that lose their blocks.", "short",
                  [(rate("vllm:num_preemptions", by=replica), of_replica)]),
        ]),
        PanelRow("Steps", [
            _quantiles("Time of a step", "By the worker's clock.", "eventlm:batch_execution_time_seconds"),
            Panel("Sequences and tokens in a step", "Means.", "short",
                  [(mean("eventlm:batch_size"), "sequences"), (mean("vllm:iteration_tokens_total"), "tokens")]),
            Panel("Busy", "Share of the time in steps.", "percentunit",
                  [(rate("eventlm:step_busy_seconds", by=replica), of_replica)]),
            _quantiles("Pauses between steps", "While there is work.", "eventlm:inter_batch_delay_seconds"),
            _quantiles("Time to plan", "Policy, batcher and router included.", "eventlm:scheduling_time_seconds"),
            Panel("Steps per second", "Of each replica.", "short", [(rate("eventlm:steps", by=replica), of_replica)]),
        ]),
        PanelRow("Backends", [
            Panel("Requests on backends", "Attempts under way, and how many there may be.", "short",
                  [(gauge("eventlm:backend_requests_running", by=backend), "{{backend}}"),
                   (gauge("eventlm:backend_request_limit", by=backend), "{{backend}} limit")]),
            Panel("Backends up", "", "short", [(gauge("eventlm:backend_up", by=backend), "{{backend}}")]),
            Panel("First tokens of backends", "p95, from the sending of a request.", "s",
                  [(_SHOWN.quantile(0.95, "eventlm:backend_first_token_seconds", by=backend), "{{backend}}")]),
            Panel("Failures per second", "Of attempts, by kind.", "short",
                  [(rate("eventlm:backend_failures", by=("backend", "kind")), "{{backend}} {{kind}}")]),
            Panel("Further attempts per second", "After a failure, and hedges.", "short",
                  [(rate("eventlm:backend_retries", by=backend), "{{backend}} retries"),
                   (rate("eventlm:backend_hedges", by=backend), "{{backend}} hedges"),
                   (rate("eventlm:backend_hedges_won"), "hedges that answered")]),
            Panel("Prefix cache hits of backends", "Of the prompt tokens that they answered, as they count them.",
                  "percentunit", [(f"{cached} / ({prompt} > 0)", "{{backend}}")]),
            Panel("What backends say", "Requests that wait there, from all clients, and KV cache in use.", "short",
                  [(gauge("eventlm:backend_reported_waiting", by=backend), "{{backend}} waiting"),
                   (gauge("eventlm:backend_kv_cache_usage", by=backend), "{{backend}} KV cache")]),
        ]),
        PanelRow("Objectives", [
            Panel("Deadlines missed", "Of the first tokens with a deadline.", "percentunit",
                  [(f"{missed} / ({missed} + {met} > 0)", "missed")]),
            Panel("Objectives missed", "Of each service class's sequences.", "percentunit",
                  [(f"{class_missed} / ({class_missed} + {class_met} > 0)", "{{service_class}}")]),
            Panel("Time to first token by class", "p95.", "s",
                  [(_SHOWN.quantile(0.95, "eventlm:class_time_to_first_token_seconds", by=service),
                    "{{service_class}}")]),
        ]),
        PanelRow("Health", [
            Panel("Replicas with a worker", "", "short", [(gauge("eventlm:replica_up", by=("instance",)),
                                                           "{{instance}}")]),
            Panel("Workers lost and plug-ins failing", "In a second.", "short",
                  [(rate("eventlm:workers_lost"), "workers lost"),
                   (rate("eventlm:recoveries"), "engines that died"),
                   (rate("eventlm:plugin_failures"), "answers of plug-ins not used")]),
            Panel("State", "1 for the state that the server is in.", "short",
                  [(gauge("eventlm:engine_state", by=("state",)), "{{state}}"),
                   (gauge("eventlm:engine_paused"), "paused")]),
            Panel("Events behind", "How far the trace lags behind the engine, and the spans behind it.", "short",
                  [(gauge("eventlm:recorder_lag_events", by=("instance",)), "{{instance}} trace"),
                   (gauge("eventlm:otlp_lag_events", by=("instance",)), "{{instance}} spans")]),
            Panel("Trace written", "", "Bps", [(rate("eventlm:log_bytes", by=("instance",)), "{{instance}}")]),
            Panel("Spans", "With --otlp-endpoint: sent, waiting, and dropped by reason.", "short",
                  [(rate("eventlm:otlp_spans_sent"), "sent"), (gauge("eventlm:otlp_spans_waiting"), "waiting"),
                   (rate("eventlm:otlp_spans_dropped", by=("reason",)), "{{reason}}")]),
            Panel("Front ends", "With --api-servers: processor time in a second.", "percentunit",
                  [(rate("eventlm:front_end_cpu_seconds", by=front_end), of_front_end)]),
            Panel("Memory of front ends", "", "bytes",
                  [(gauge("eventlm:front_end_memory_bytes", by=front_end), of_front_end)]),
        ]),
    ]  # fmt: skip


def _quantiles(title: str, description: str, name: str) -> Panel:
    lines = [(_SHOWN.quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)]
    return Panel(title, description, "s", lines)


def dashboard_file(job: str) -> str:
    """The dashboard as Grafana imports it, in JSON. job: which one it shows at first."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in panel_rows():
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        panels.append({**heading, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}})
        top += 1
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, _COLUMNS)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": top + line * _HEIGHT}
            panels.append(_as_object(panel) | {"gridPos": place})
        top += -(-len(row.panels) // _COLUMNS) * _HEIGHT
    dashboard = {
        "title": "eventlm",
        "uid": "eventlm",
        "tags": ["eventlm", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(job)},
        "annotations": {"list": []},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, start=1)],
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _as_object(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 25, "stacking": {"mode": "normal"}} if panel.is_stacked else {}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variables(job: str) -> list[dict[str, Any]]:
    def choice(name: str, query: str, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            **more,
        }

    chosen = {"text": job, "value": job}
    every = {"text": "All", "value": "$__all"}
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        choice("job", "label_values(eventlm:engine_state, job)", current=chosen),
        choice(
            "instance",
            'label_values(eventlm:engine_state{job="$job"}, instance)',
            multi=True,
            includeAll=True,
            allValue=".*",
            current=every,
        ),
    ]
