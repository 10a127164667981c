"""Queries are made of the families that there are, and of nothing else."""

from __future__ import annotations

import pytest

from eventlm.monitoring.queries import Queries

ALL = Queries("", "1m")
ONE = Queries('job="eventlm"', "5m")


def test_expressions() -> None:
    assert ALL.gauge("vllm:num_requests_waiting") == "sum by () (vllm:num_requests_waiting)"
    assert (
        ONE.gauge("eventlm:engine_state", by=("instance",), where='state="ready"')
        == 'sum by (instance) (eventlm:engine_state{job="eventlm", state="ready"})'
    )
    assert ONE.rate("eventlm:steps", by=("engine",)) == 'sum by (engine) (rate(eventlm:steps_total{job="eventlm"}[5m]))'
    assert ALL.increase("http_requests", where='status!="2xx"') == (
        'sum by () (increase(http_requests_total{status!="2xx"}[1m]))'
    )
    assert ALL.quantile(0.95, "vllm:time_to_first_token_seconds", by=("instance",)) == (
        "histogram_quantile(0.95, sum by (le, instance) (rate(vllm:time_to_first_token_seconds_bucket[1m])))"
    )
    assert ALL.mean("http_request_duration_seconds") == (
        "sum by () (rate(http_request_duration_seconds_sum[1m])) / "
        "sum by () (rate(http_request_duration_seconds_count[1m]))"
    )


def test_a_family_that_was_renamed_is_an_error() -> None:
    for query in (ALL.gauge, ALL.rate, ALL.increase, ALL.mean):
        with pytest.raises(ValueError, match="no family 'vllm:num_requests_swapped'"):
            query("vllm:num_requests_swapped")


def test_so_is_one_of_another_kind() -> None:
    with pytest.raises(ValueError, match="another kind"):
        ALL.rate("vllm:num_requests_waiting")
    with pytest.raises(ValueError, match="another kind"):
        ALL.quantile(0.5, "eventlm:steps")


def test_and_a_label_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="no label 'service_class'"):
        ALL.rate("eventlm:steps", by=("service_class",))
    with pytest.raises(ValueError, match="no label 'state'"):
        ALL.gauge("eventlm:replica_up", where='state="ready"')
