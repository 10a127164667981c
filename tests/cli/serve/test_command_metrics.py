"""/metrics of a real server against what the openai client saw, and against what the trace adds up to."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eventlm.events import Finished, Launched, StepCompleted
from eventlm.metrics.components import EngineMetrics
from eventlm.metrics.families import families
from eventlm.metrics.store import MetricsStore
from tests.cli.conftest import StartServer
from tests.processes import wait_until
from tests.serving import Server, verified


def scrape(server: Server) -> dict[str, Any]:
    reply = server.request("GET", "/metrics")
    assert reply.status == 200
    return {family.name: family for family in text_string_to_metric_families(reply.data.decode())}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    """Sum of all samples of this name with these labels."""
    family = found[next(key for key in sorted(found, key=len, reverse=True) if name.startswith(key))]
    return sum(s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items())


def settled(server: Server, *, num_ended: int) -> dict[str, Any] | None:
    """The metrics once so many sequences have ended, their last steps, which complete behind the end, are over, and
    all of the log is in its file."""
    trace = verified(server.trace, check_invariants=False)
    if len(trace.of(Finished)) < num_ended or len(trace.of(Launched)) > len(trace.of(StepCompleted)):
        return None
    found = scrape(server)
    return found if value(found, "eventlm:log_bytes_total") == server.trace.stat().st_size else None


def test_metrics_agree_with_what_clients_saw(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--replicas", "2", "--max-num-seqs", "8")
    client = server.client()
    usages = []
    for number in range(12):
        reply = client.completions.create(
            model="fake", prompt=f"a prompt of some length, the {number % 3}th", max_tokens=5 + number, n=1 + number % 2
        )
        usages.append((reply.usage, len(reply.choices)))
    with client.completions.create(model="fake", prompt="left", max_tokens=8000, stream=True) as stream:
        next(stream)
        running = scrape(server)
        assert value(running, "vllm:num_requests_running") == 1
        assert 0 < value(running, "vllm:kv_cache_usage_perc") <= 1
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt="x", max_tokens=10**6)
    found = wait_until(lambda: settled(server, num_ended=19))

    assert value(found, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(found, "eventlm:requests_total") == 13
    assert value(found, "vllm:num_requests_running") == value(found, "vllm:num_requests_waiting") == 0
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    # As in vLLM, each of a request's samples has its prompt.
    prompt_tokens = sum(usage.prompt_tokens * n for usage, n in usages)
    output_tokens = sum(usage.completion_tokens for usage, _ in usages)
    assert value(found, "vllm:request_prompt_tokens_sum") == prompt_tokens
    assert value(found, "vllm:request_generation_tokens_sum") == output_tokens
    assert value(found, "vllm:prompt_tokens_total") - prompt_tokens == 4 + 1
    assert value(found, "vllm:generation_tokens_total") > output_tokens
    # One for each request: half of them had two samples of one length.
    assert value(found, "vllm:request_max_num_generation_tokens_count") == len(usages)
    longest = sum(usage.completion_tokens // n for usage, n in usages)
    assert value(found, "vllm:request_max_num_generation_tokens_sum") == longest
    assert value(found, "http_requests_total", handler="/v1/completions", status="2xx") == len(usages)
    # One client left, and one asked for too much.
    assert value(found, "http_requests_total", handler="/v1/completions", status="4xx") == 2
    assert value(found, "vllm:e2e_request_latency_seconds_count") == 18
    assert value(found, "vllm:time_to_first_token_seconds_count") == 19
    gaps = value(found, "vllm:inter_token_latency_seconds_count")
    assert gaps == value(found, "vllm:generation_tokens_total") - 19
    assert value(found, "eventlm:scheduling_time_seconds_count") > 0

    trace = server.stop_and_verify()
    store = MetricsStore()
    for event in trace.events:
        store.apply(event)
    log = store.snapshot()
    empty = log.replicas[0].histograms["batch_size"]
    rebuilt = list(families(EngineMetrics(log=log, state="dead", scheduling_time=empty)))
    for family in rebuilt:
        if family.name.startswith("vllm:"):
            assert {(s.name, tuple(sorted(s.labels.items()))): s.value for s in family.samples} == {
                (s.name, tuple(sorted(s.labels.items()))): s.value for s in found[family.name].samples
            }
