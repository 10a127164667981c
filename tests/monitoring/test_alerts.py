"""Every alert fires where it should and is silent where it nearly should, as Prometheus's own test program sees it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eventlm.cli.main import _parser
from eventlm.monitoring.alerts import (
    BURNS,
    LEAST_OBJECTIVE,
    AlertRule,
    Thresholds,
    alert_rules,
    rules_file,
)
from tests.monitoring.prometheus import needs_prometheus, promtool

INSTANCE = "10.0.0.7:8000"
RULES = {rule.name: rule for rule in alert_rules("eventlm")}
#: Series by name and labels, and their values: `FIRST+STEPxCOUNT`, one for each minute.
Series = dict[str, str]


def constant(value: float) -> str:
    return f"{value:g}+0x40"


def growing(by: float) -> str:
    return f"0+{by:g}x40"


def buckets(name: str, **counts: float) -> Series:
    """A histogram's buckets by their bound; counts are those of a minute, up to it."""
    return {f'{name}_bucket{{le="{bound.lstrip("_")}"}}': growing(count) for bound, count in counts.items()}


QUEUE, TTFT = "vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"
PREEMPTED, ENDED = "vllm:num_preemptions_total{}", 'vllm:request_success_total{finished_reason="length"}'
MISSED, MET = "eventlm:deadlines_missed_total{}", "eventlm:deadlines_met_total{}"
SLO_MISSED, SLO_MET = (f'eventlm:class_slo_{each}_total{{service_class="gold"}}' for each in ("missed", "met"))
WAITING, RUNNING, USAGE = "vllm:num_requests_waiting{}", "vllm:num_requests_running{}", "vllm:kv_cache_usage_perc{}"
PAUSED = "eventlm:engine_paused{}"
READY, DEAD = (f'eventlm:engine_state{{state="{state}"}}' for state in ("ready", "dead"))
GENERATED = "vllm:generation_tokens_total{}"
BACKEND_UP, WANTED = (f'eventlm:backend_{each}{{backend="a:1"}}' for each in ("up", "wanted"))
ATTEMPTS, FAILURES = 'eventlm:backend_attempts_total{backend="a:1"}', 'eventlm:backend_failures_total{backend="a:1"}'
DROPPED = 'eventlm:otlp_spans_dropped_total{reason="queue_full"}'

#: A server under load of which nothing need be said.
HEALTHY: Series = {
    "up{}": constant(1),
    READY: constant(1),
    DEAD: constant(0),
    PAUSED: constant(0),
    WAITING: constant(3),
    RUNNING: constant(20),
    USAGE: constant(0.9),
    "eventlm:steps_total{}": growing(600),
    **buckets(QUEUE, _1=90, _10=99, _15=100, **{"+Inf": 100}),
    **buckets(TTFT, _1=90, _5=99, _10=100, **{"+Inf": 100}),
    GENERATED: growing(5000),
    BACKEND_UP: constant(1),
    WANTED: constant(1),
    ATTEMPTS: growing(100),
    FAILURES: growing(4),
    PREEMPTED: growing(2),
    ENDED: growing(100),
    MISSED: growing(1),
    MET: growing(99),
    SLO_MISSED: growing(1),
    SLO_MET: growing(99),
    "eventlm:workers_lost_total{}": constant(4),
    "eventlm:recoveries_total{}": constant(2),
    "eventlm:replica_up{}": constant(1),
    "eventlm:recorder_writing{}": constant(1),
    "eventlm:recorder_lag_events{}": constant(900),
    "eventlm:plugin_failures_total{}": constant(7),
    DROPPED: constant(3),
}


class Firing(NamedTuple):
    """What is another in a server that the alert is for, the value that it shows, and its labels."""

    alert: str
    changes: Series
    value: str = ""
    labels: dict[str, str] = {}


REPLICA = {"engine": "0"}
#: Neither a step nor a token.
STILL: Series = {"eventlm:steps_total{}": constant(600), GENERATED: constant(9)}
FIRING = [
    Firing("EventlmDown", {"up{}": constant(0)}),
    Firing("EventlmDown", {DEAD: constant(1), READY: constant(0)}),
    Firing("EventlmStalled", STILL, "23"),
    Firing("EventlmQueueTime", buckets(QUEUE, _1=0, _10=0, _15=100, **{"+Inf": 100}), "14.5s"),
    Firing("EventlmTimeToFirstToken", buckets(TTFT, _1=0, _5=0, _10=100, **{"+Inf": 100}), "9.75s"),
    Firing("EventlmPreemptionThrash", {PREEMPTED: growing(6), ENDED: growing(5)}, "60"),
    Firing("EventlmBlocksExhausted", {USAGE: constant(0.99)}, "99%", REPLICA),
    Firing("EventlmDeadlinesMissed", {MISSED: growing(25), MET: growing(75)}, "25%"),
    # The fast burn, then the slow one.
    Firing("EventlmSloBurn", {SLO_MISSED: growing(20), SLO_MET: growing(80)}, "20%", {"service_class": "gold"}),
    Firing("EventlmSloBurn", {SLO_MISSED: growing(10), SLO_MET: growing(90)}, "10%", {"service_class": "gold"}),
    Firing("EventlmWorkerLost", {"eventlm:workers_lost_total{}": "4+0x35 5+0x5"}, "", REPLICA),
    Firing("EventlmWorkerLost", {"eventlm:replica_up{}": constant(0)}, "", REPLICA),
    Firing("EventlmEngineDied", {"eventlm:recoveries_total{}": "2+0x35 3+0x5"}, ""),
    Firing("EventlmBackendDown", {BACKEND_UP: constant(0)}, "", {"backend": "a:1"}),
    Firing("EventlmBackendFailing", {FAILURES: growing(8)}, "80", {"backend": "a:1"}),
    Firing("EventlmRecorderBehind", {"eventlm:recorder_writing{}": constant(0)}),
    Firing("EventlmRecorderBehind", {"eventlm:recorder_lag_events{}": constant(20_000)}),
    Firing("EventlmPluginFailing", {"eventlm:plugin_failures_total{}": growing(1)}, "10"),
    Firing("EventlmSpansDropped", {DROPPED: growing(2)}, "20"),
]
#: What is nearly as bad, of which the alert says nothing.
SILENT = [
    ("EventlmDown", {DEAD: constant(0), READY: constant(0)}),
    # Idle, draining, paused, or with a step that has just ended.
    ("EventlmStalled", STILL | {WAITING: constant(0), RUNNING: constant(0)}),
    ("EventlmStalled", STILL | {READY: constant(0)}),
    ("EventlmStalled", STILL | {PAUSED: constant(1)}),
    ("EventlmStalled", STILL | {"eventlm:steps_total{}": "600+0x39 601"}),
    # Other servers answer.
    ("EventlmStalled", {"eventlm:steps_total{}": constant(0)}),
    ("EventlmQueueTime", buckets(QUEUE, _1=0, _10=91, _15=100, **{"+Inf": 100})),
    ("EventlmTimeToFirstToken", buckets(TTFT, _1=0, _5=96, _10=100, **{"+Inf": 100})),
    ("EventlmPreemptionThrash", {PREEMPTED: growing(6), ENDED: growing(7)}),
    ("EventlmPreemptionThrash", {PREEMPTED: growing(0.5), ENDED: constant(0)}),
    ("EventlmBlocksExhausted", {USAGE: constant(0.99), WAITING: constant(0)}),
    ("EventlmDeadlinesMissed", {MISSED: growing(4), MET: growing(96)}),
    ("EventlmDeadlinesMissed", {MISSED: constant(0), MET: constant(0)}),
    ("EventlmSloBurn", {SLO_MISSED: growing(5), SLO_MET: growing(95)}),
    ("EventlmWorkerLost", {"eventlm:workers_lost_total{}": "4+0x25 5+0x20"}),
    ("EventlmEngineDied", {"eventlm:recoveries_total{}": "2+0x25 3+0x20"}),
    ("EventlmBackendDown", {BACKEND_UP: constant(0), WANTED: constant(0)}),
    ("EventlmBackendFailing", {FAILURES: growing(0.4), ATTEMPTS: growing(1)}),
    ("EventlmRecorderBehind", {"eventlm:recorder_lag_events{}": constant(9_000)}),
    ("EventlmPluginFailing", {"eventlm:plugin_failures_total{}": "7+0x25 9+0x20"}),
    ("EventlmSpansDropped", {DROPPED: "3+0x25 9+0x20"}),
]


def labelled(series: str) -> str:
    """A series of the one server that the tests have."""
    labels = {"job": "eventlm", "instance": INSTANCE} | ({"engine": "0"} if "{}" in series else {})
    added = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return series.replace("{}", "{" + added + "}") if "{}" in series else series.replace("}", f",{added}}}")


def shown(text: str, labels: dict[str, str], value: str) -> str:
    """An annotation as Prometheus fills it in."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
    return re.sub(r"\{\{ \$value.*?\}\}", value, text)


def expected(rule: AlertRule, firing: Firing) -> dict[str, Any]:
    labels = {"instance": INSTANCE, **firing.labels}
    annotations = {
        key: shown(getattr(rule, key), labels, firing.value) for key in ("summary", "description", "command")
    }
    return {"exp_labels": {"severity": rule.severity, **labels}, "exp_annotations": annotations}


def rule_test(name: str, changes: Series, checks: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A test of promtool's, after 40 minutes."""
    series = HEALTHY | changes
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": labelled(each), "values": values} for each, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "40m", "alertname": alert, "exp_alerts": alerts} for alert, alerts in checks.items()
        ],
    }


@needs_prometheus
def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(rules_file(list(RULES.values())))
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(tmp_path / "alerts.yml"))
    tests = [rule_test("healthy", {}, {name: [] for name in RULES})]
    tests += [rule_test(f"{each.alert} fires", each.changes, {each.alert: [expected(RULES[each.alert], each)]})
              for each in FIRING]  # fmt: skip
    tests += [rule_test(f"{alert} is silent", changes, {alert: []}) for alert, changes in SILENT]
    # JSON is YAML, too.
    (tmp_path / "tests.yml").write_text(
        json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(tmp_path / "tests.yml"))


def test_every_alert_has_both_tests() -> None:
    assert {each.alert for each in FIRING} == {alert for alert, _ in SILENT} == RULES.keys()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_alert_names_a_command_that_there_is(rule: AlertRule) -> None:
    program, *words = shlex.split(rule.command)
    assert program == "eventlm"
    assert _parser(words[0]).parse_args(words).run


def test_thresholds_and_job_are_those_that_were_asked_for() -> None:
    rules = {rule.name: rule for rule in alert_rules("llm", Thresholds(21, 22, 0.995))}
    assert rules["EventlmQueueTime"].expression.endswith("> 21")
    assert rules["EventlmTimeToFirstToken"].expression.endswith("> 22")
    assert "> 0.072" in rules["EventlmSloBurn"].expression
    assert "0.5%" in rules["EventlmSloBurn"].description
    assert all('job="llm"' in rule.expression for rule in rules.values())


def test_at_every_objective_misses_can_burn_fast_enough() -> None:
    assert max(factor for *_, factor in BURNS) * (1 - LEAST_OBJECTIVE) < 1
