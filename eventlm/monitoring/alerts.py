"""Alert rules for Prometheus. Each says what is wrong, how much, and the command that shows why."""

from __future__ import annotations

import json
from typing import NamedTuple

from eventlm.monitoring.queries import Queries

#: Windows of a burn rate, its factor, and for how long it must last: those of Google's SRE workbook that wake somebody
#: up. At 14.4 times the rate that the objective allows, a month's misses are used up in two days.
BURNS = (("1h", "5m", 14.4), ("6h", "30m", 6.0))
#: Below the first, no share of misses is 14.4 times what the objective allows.
LEAST_OBJECTIVE, MOST_OBJECTIVE = 0.95, 0.99999


class Thresholds(NamedTuple):
    """From where on to alert. objective: the share of a class's sequences that should meet its objectives,
    from LEAST_OBJECTIVE to MOST_OBJECTIVE.
    """

    queue_seconds: float = 10
    ttft_seconds: float = 5
    objective: float = 0.99


class AlertRule(NamedTuple):
    """One rule. lasts: for how long `expression` must hold. command: what to run on the server's machine."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    description: str
    command: str


def alert_rules(job: str, thresholds: Thresholds = Thresholds()) -> list[AlertRule]:  # noqa: B008
    """All rules, for the servers that Prometheus scrapes under this job."""
    selector = f"job={json.dumps(job)}"
    short, medium, long = (Queries(selector, window) for window in ("2m", "5m", "10m"))
    server, replica, service = ("instance",), ("instance", "engine"), ("instance", "service_class")
    backend = ("instance", "backend")
    waiting = long.gauge("vllm:num_requests_waiting", by=server)
    running = long.gauge("vllm:num_requests_running", by=server)
    dead = long.gauge("eventlm:engine_state", by=server, where='state="dead"')
    ready = long.gauge("eventlm:engine_state", by=server, where='state="ready"')
    paused = long.gauge("eventlm:engine_paused", by=server)
    missed, met = (long.increase(f"eventlm:deadlines_{outcome}", by=server) for outcome in ("missed", "met"))
    failures = long.increase("eventlm:backend_failures", by=backend)
    preemptions = long.increase("vllm:num_preemptions", by=server)
    return [
        AlertRule(
            "EventlmDown",
            f"sum by (instance) (up{{{selector}}}) == 0\nor {dead} == 1",
            "1m",
            "critical",
            "{{ $labels.instance }} does not answer, or its engine is dead",
            "Prometheus cannot read /metrics of the server, or no worker is left and it serves nothing.",
            "eventlm trace info",
        ),
        AlertRule(
            "EventlmStalled",
            f"({waiting} + {running}) > 0\nand {short.rate('eventlm:steps', by=server)} == 0\n"
            f"and {short.rate('vllm:generation_tokens', by=server)} == 0\nand {ready} == 1\nunless {paused} == 1",
            "1m",
            "critical",
            "{{ $labels.instance }} has requests and computes no step",
            "The server says that it is ready and not paused, {{ $value }} requests wait or run, and for three minutes "
            "no step has ended and no backend has sent a token.",
            "eventlm debug -c 'goto end' -c 'show plan'",
        ),
        AlertRule(
            "EventlmQueueTime",
            f"{medium.quantile(0.9, 'vllm:request_queue_time_seconds', by=server)} > {thresholds.queue_seconds:g}",
            "5m",
            "warning",
            "requests queue on {{ $labels.instance }}",
            "One of ten requests waits {{ $value | humanizeDuration }} or longer for its first step.",
            "eventlm explain --slowest 10 --by queue",
        ),
        AlertRule(
            "EventlmTimeToFirstToken",
            f"{medium.quantile(0.95, 'vllm:time_to_first_token_seconds', by=server)} > {thresholds.ttft_seconds:g}",
            "5m",
            "warning",
            "first tokens are late on {{ $labels.instance }}",
            "One of twenty requests waits {{ $value | humanizeDuration }} or longer for its first token.",
            "eventlm explain --slowest 10 --by ttft",
        ),
        AlertRule(
            "EventlmPreemptionThrash",
            f"{preemptions} > 10\nand {preemptions} > {long.increase('vllm:request_success', by=server)}",
            "5m",
            "warning",
            "{{ $labels.instance }} preempts more than it finishes",
            "{{ $value | humanize }} preemptions in ten minutes, more than sequences that ended: their work is "
            "thrown away and done again.",
            "eventlm trace grep --kind preempt",
        ),
        AlertRule(
            "EventlmBlocksExhausted",
            f"{long.gauge('vllm:kv_cache_usage_perc', by=replica, fold='min')} > 0.95\nand on (instance) {waiting} > 0",
            "10m",
            "warning",
            "replica {{ $labels.engine }} of {{ $labels.instance }} is out of KV blocks",
            "{{ $value | humanizePercentage }} of its blocks are in use, and requests wait.",
            "eventlm debug -c 'goto end' -c 'show pool'",
        ),
        AlertRule(
            "EventlmDeadlinesMissed",
            f"{missed} / ({missed} + {met}) > 0.05",
            "5m",
            "warning",
            "first tokens miss their deadlines on {{ $labels.instance }}",
            "{{ $value | humanizePercentage }} of the deadlines of the last ten minutes were missed.",
            "eventlm replay --policy edf",
        ),
        AlertRule(
            "EventlmSloBurn",
            "\nor ".join(_burn(selector, service, *burn, 1 - thresholds.objective) for burn in BURNS),
            "2m",
            "critical",
            "class {{ $labels.service_class }} misses its objectives on {{ $labels.instance }}",
            "{{ $value | humanizePercentage }} of its sequences miss them, and "
            f"{100 * (1 - thresholds.objective):.3g}% may: at this rate a month's share is used up within days.",
            "eventlm explain --slowest 10",
        ),
        AlertRule(
            "EventlmWorkerLost",
            f"{long.increase('eventlm:workers_lost', by=replica)} > 0\n"
            f"or {long.gauge('eventlm:replica_up', by=replica)} == 0",
            "0m",
            "warning",
            "replica {{ $labels.engine }} of {{ $labels.instance }} lost its worker",
            "A worker died or hung in the last ten minutes, or none is back yet.",
            "eventlm trace grep --kind worker_lost,desync",
        ),
        AlertRule(
            "EventlmEngineDied",
            f"{long.increase('eventlm:recoveries', by=server)} > 0",
            "0m",
            "warning",
            "the engine of {{ $labels.instance }} died, and another one goes on",
            "An engine died in the last ten minutes. Requests went on, later than they should have.",
            "eventlm trace grep --kind recovered",
        ),
        AlertRule(
            "EventlmBackendDown",
            f"{long.gauge('eventlm:backend_up', by=backend)} == 0\n"
            f"unless {long.gauge('eventlm:backend_wanted', by=backend)} == 0",
            "1m",
            "warning",
            "backend {{ $labels.backend }} of {{ $labels.instance }} is down",
            "It does not answer, or has failed too often in a row. It is asked again and again, and gets no requests "
            "until it answers.",
            "eventlm trace grep --kind backend_down,forward_failed",
        ),
        AlertRule(
            "EventlmBackendFailing",
            f"{failures} > 5\nand {failures} / {long.increase('eventlm:backend_attempts', by=backend)} > 0.05",
            "5m",
            "warning",
            "requests fail on backend {{ $labels.backend }} of {{ $labels.instance }}",
            "{{ $value | humanize }} attempts there failed in ten minutes, more than one of twenty.",
            "eventlm trace grep --kind forward_failed",
        ),
        AlertRule(
            "EventlmRecorderBehind",
            f"{long.gauge('eventlm:recorder_writing', by=server)} == 0\n"
            f"or {long.gauge('eventlm:recorder_lag_events', by=server)} > 10000",
            "1m",
            "warning",
            "the trace of {{ $labels.instance }} lags or is not written",
            "The disk is full, broken or slow; what is not written in time is missing from the trace.",
            "eventlm trace info",
        ),
        AlertRule(
            "EventlmPluginFailing",
            f"{long.increase('eventlm:plugin_failures', by=server)} > 0",
            "0m",
            "warning",
            "a policy, batcher or router fails on {{ $labels.instance }}",
            "{{ $value | humanize }} of its answers in ten minutes could not be used; the server decided by itself.",
            "eventlm trace grep --kind plugin_failed",
        ),
        AlertRule(
            "EventlmSpansDropped",
            f"{long.increase('eventlm:otlp_spans_dropped', by=server)} > 0",
            "5m",
            "warning",
            "spans of {{ $labels.instance }} are lost",
            "{{ $value | humanize }} spans were dropped in ten minutes: the OTLP endpoint is down, slow or refuses "
            "them. The trace has them all.",
            "eventlm trace export --format otlp -o spans.jsonl",
        ),
    ]


def _burn(
    selector: str, by: tuple[str, ...], long_window: str, short_window: str, factor: float, allowed: float
) -> str:
    """Whether misses burn the allowed share at this factor, over a long window and still over a short one."""

    def share(window: str) -> str:
        queries = Queries(selector, window)
        missed, met = (queries.rate(f"eventlm:class_slo_{outcome}", by=by) for outcome in ("missed", "met"))
        return f"{missed} / ({missed} + {met})"

    limit = f"{factor * allowed:g}"
    return f"({share(long_window)} > {limit} and {share(short_window)} > {limit})"


def rules_file(rules: list[AlertRule]) -> str:
    """The rules as Prometheus reads them, in YAML."""
    lines = ["groups:", "  - name: eventlm", "    rules:"]
    for rule in rules:
        lines += [f"      - alert: {rule.name}", "        expr: |-"]
        lines += [f"          {line}" for line in rule.expression.splitlines()]
        lines += [f"        for: {rule.lasts}", "        labels:", f"          severity: {rule.severity}"]
        lines += ["        annotations:"]
        # A string of JSON is one of YAML, too.
        lines += [f"          {key}: {json.dumps(getattr(rule, key))}" for key in ("summary", "description", "command")]
    return "\n".join(lines) + "\n"
