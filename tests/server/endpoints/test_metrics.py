"""GET /metrics: the names and buckets that dashboards know, in formats that Prometheus's own parsers read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import BackendDown, BackendState, WorkerLost
from eventlm.events.forwarding import FailureKind
from eventlm.metrics.aggregates import ClassMetrics
from eventlm.metrics.components import CacheInfo, EngineMetrics
from eventlm.metrics.families import FINISHED_REASONS, families
from eventlm.metrics.histograms import Histogram
from eventlm.metrics.store import MetricsStore
from eventlm.system.system import real_system
from eventlm.types import FinishReason
from tests.metrics.test_forwarded import Measured
from tests.replay.backend_runs import record_backends
from tests.replay.golden import FOLDER
from tests.server.conftest import RunningServer
from tests.server.dashboards import GIVEN, NOT_GIVEN, SELECTED
from tests.simulation import Simulation

#: What dashboards for vLLM ask for, by kind.
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
}
COUNTERS = {
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:admission_rejections",
}
TTFT = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
INTER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
LENGTHS = [1, 2, 5, 10, 20, 50]
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": INTER_TOKEN,
    "vllm:request_time_per_output_token_seconds": INTER_TOKEN,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:request_decode_time_seconds": LATENCY,
    "vllm:request_inference_time_seconds": LATENCY,
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_prefill_kv_computed_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_max_num_generation_tokens": LENGTHS,
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "vllm:request_num_preemptions": [1, 2, 3, 4, 5, 10, 20],
}
EXTRA_LABELS = {
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:request_success": {"finished_reason"},
    "vllm:engine_sleep_state": {"sleep_state"},
    "vllm:prompt_tokens_by_source": {"source"},
    "vllm:prompt_tokens_cached_by_source": {"source"},
    "vllm:cache_config_info": {
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "cache_dtype",
        "enable_prefix_caching",
        "gpu_memory_utilization",
    },
    "vllm:admission_rejections": {"reason"},
}


CACHE = CacheInfo(block_size=4, num_blocks=9, prefix_cache=True, dtype="auto", gpu_memory_utilization="0.9")


def feed(server: RunningServer, name: str = "lrs_dying_workers") -> None:
    """Let the server's engine have lived through a golden trace (92 tokens of context, two replicas)."""
    with LogReader(FOLDER / f"{name}.jsonl") as reader:
        for line in reader:
            server.engine.store.apply(line.event())


def scrape(server: RunningServer) -> dict[str, Any]:
    """Families by name, as Prometheus's parser reads them."""
    reply = server.request("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.headers["x-request-id"]
    return {family.name: family for family in parse_text(reply.data.decode())}


def total(family: Any, suffix: str = "", **labels: str) -> float:
    """Sum over the samples with this suffix and these labels."""
    return sum(
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )


def test_other_servers_are_one_engine_and_told_apart_by_their_names() -> None:
    rig = Measured(3, limit=1)
    request = rig.arrive(prompt_tokens=8)
    rig.stream(request)
    rig.end(request, prompt_tokens=9, cached_tokens=6)
    rig.fail(rig.arrive(), "overloaded")
    rig.feed(BackendState(replica=1, epoch=1, running=3, waiting=2, kv_used_ppm=250_000))
    rig.feed(BackendDown(replica=2, epoch=1, reason="drained"))
    metrics = EngineMetrics(log=rig.store.snapshot(), state="ready", scheduling_time=Histogram.over((1,)), cache=CACHE)
    found = {family.name: family for family in families(metrics)}
    for name in ("vllm:num_requests_running", "vllm:generation_tokens", "vllm:e2e_request_latency_seconds"):
        assert {(each.labels["model_name"], each.labels["engine"]) for each in found[name].samples} == {("m", "0")}
    assert total(found["vllm:num_requests_waiting"]) == 1
    assert total(found["vllm:generation_tokens"], "_total") == 4
    assert total(found["vllm:prompt_tokens_cached"], "_total") == 6
    assert [each.value for each in found["vllm:kv_cache_usage_perc"].samples] == [0.25]
    assert found["eventlm:replica_up"].samples[0].value == 1
    assert "vllm:cache_config_info" not in found

    def of(name: str, backend: int, suffix: str = "", **labels: str) -> float:
        return total(found[f"eventlm:backend_{name}"], suffix, backend=f"host:{8000 + backend}", **labels)

    assert [of("up", each) for each in range(3)] == [1, 1, 0]
    assert [of("wanted", each) for each in range(3)] == [1, 1, 0]
    assert [of("attempts", each, "_total") for each in range(3)] == [2, 0, 0]
    assert [of("answers", each, "_total") for each in range(3)] == [1, 0, 0]
    assert [of("retries", each, "_total") for each in range(3)] == [1, 0, 0]
    assert of("failures", 0, "_total", kind="overloaded") == of("failures", 0, "_total") == 1
    assert {each.labels["kind"] for each in found["eventlm:backend_failures"].samples} == {*get_args(FailureKind)}
    assert [of("first_token_seconds", each, "_count") for each in range(3)] == [1, 0, 0]
    assert (of("prompt_tokens", 0, "_total"), of("prompt_tokens_cached", 0, "_total")) == (9, 6)
    # Those that do not say have no sample.
    assert [each.value for each in found["eventlm:backend_reported_waiting"].samples] == [2]
    assert of("kv_cache_usage", 1) == 0.25
    rig.feed(BackendDown(replica=2, epoch=1, reason="removed"))
    left = families(structs.replace(metrics, log=rig.store.snapshot()))
    [up] = [family for family in left if family.name == "eventlm:backend_up"]
    assert [each.labels["backend"] for each in up.samples] == ["host:8000", "host:8001"]


def test_own_workers_beside_other_servers_stay_apart(tmp_path: Path) -> None:
    """One run each, with the own replicas before the others and behind them."""
    for seed in (1, 2):
        store = MetricsStore()
        with LogReader(record_backends(tmp_path, seed)) as reader:
            for line in reader:
                store.apply(line.event())
        log = store.snapshot()
        found = {
            family.name: family
            for family in families(EngineMetrics(log=log, state="dead", scheduling_time=Histogram.over((1,))))
        }
        sizes = {each.first: len(replicas) for each, replicas in log.by_set() if not each.forwards}
        ((first, size),) = sizes.items()
        engines = {each.labels["engine"] for each in found["vllm:generation_tokens"].samples}
        others = {str(each.first) for each, _ in log.by_set() if each.forwards}
        assert engines == {str(index) for index in range(first, first + size)} | others
        assert total(found["vllm:generation_tokens"], "_total") == sum(each.generation_tokens for each in log.replicas)
        steps = {each.labels["engine"]: each.value for each in found["eventlm:steps"].samples}
        assert sum(steps.values()) == sum(each.num_steps for each in log.replicas) > 0
        assert not any(steps[each] for each in others)


def test_http_requests_are_counted_as_vllm_counts_them(server: RunningServer) -> None:
    """By route and class of status; what monitors poll is left out."""
    for _ in range(2):
        assert server.complete(max_tokens=3).status == 200
    assert server.complete(max_tokens=-1).status == 400
    for method, path, status in [
        ("GET", "/health", 200),
        ("GET", "/version", 200),
        ("GET", "/v1/models/test", 200),
        ("GET", "/v1/models/other", 404),
        ("GET", "/nowhere/at/all", 404),
        ("PROPFIND", "/pot", 404),
        ("DELETE", "/v1/completions", 405),
    ]:
        assert server.request(method, path).status == status
    scrape(server)
    [family] = [family for name, family in scrape(server).items() if name == "http_requests"]
    assert family.type == "counter"
    samples = {
        tuple(sample.labels[name] for name in ("handler", "method", "status")): sample for sample in family.samples
    }
    assert {sample.name for sample in samples.values()} == {"http_requests_total"}
    assert {labels: sample.value for labels, sample in samples.items()} == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
        ("none", "other", "4xx"): 1,
        ("none", "DELETE", "4xx"): 1,
    }


def test_the_time_of_http_requests(server: RunningServer) -> None:
    for _ in range(2):
        assert server.complete(max_tokens=3).status == 200
    family = scrape(server)["http_request_duration_seconds"]
    labels = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    assert total(family, "_count", **labels) == 2
    assert 0 < total(family, "_sum", **labels) < 60


def test_what_the_dashboards_read(server: RunningServer) -> None:
    """All of it is given, or there is a reason why not."""
    feed(server)
    assert server.complete(max_tokens=3).status == 200
    found = scrape(server)
    assert found.keys() >= GIVEN
    assert not GIVEN & NOT_GIVEN.keys()
    assert not found.keys() & NOT_GIVEN.keys()
    # One that is new here belongs into one of the two lists.
    others = {"vllm:admission_rejections", "vllm:request_inference_time_seconds", "vllm:request_num_preemptions"}
    assert {name for name in found if name.startswith("vllm:")} == {n for n in GIVEN if n.startswith("vllm:")} | others
    for name, labels in SELECTED.items():
        for label, values in labels.items():
            assert {sample.labels[label] for sample in found[name].samples} >= values


def test_where_prompt_tokens_came_from(server: RunningServer) -> None:
    feed(server)
    found = scrape(server)
    by_source = found["vllm:prompt_tokens_by_source"]
    cached = total(found["vllm:prompt_tokens_cached"], "_total")
    assert total(by_source, "_total") == total(found["vllm:prompt_tokens"], "_total")
    assert total(by_source, "_total", source="local_cache_hit") == cached > 0
    assert total(found["vllm:prompt_tokens_cached_by_source"], "_total", source="device") == cached
    computed = found["vllm:request_prefill_kv_computed_tokens"]
    assert 0 < total(computed, "_sum") < total(found["vllm:request_prompt_tokens"], "_sum")


def test_the_configuration_of_the_cache(server: RunningServer) -> None:
    feed(server)
    labels = {"block_size": "16", "num_gpu_blocks": "64", "kv_cache_size_tokens": "1024", "cache_dtype": "auto"}
    labels |= {"enable_prefix_caching": "True", "gpu_memory_utilization": "0.9"}
    for engine in ("0", "1"):
        assert total(scrape(server)["vllm:cache_config_info"], engine=engine, **labels) == 1


def test_rejections_by_their_reason(server: RunningServer) -> None:
    """Those of the log, and those of keys' limits, which it never saw."""
    feed(server)
    limited = structs.replace(server.call(server.engine.read_metrics()), rate_limited={"": 2, "gold": 3})
    limited.log.replicas[0].reject_reasons["queue_full"] = 7
    limited.log.classes["bronze"] = ClassMetrics(reject_reasons={"queue_full": 4})
    found = {family.name: family for family in families(limited)}
    rejections = found["vllm:admission_rejections"]
    assert total(rejections, "_total", reason="queue_full") == 7
    assert total(rejections, "_total", reason="context_length") == 0
    assert total(rejections, "_total", reason="rate_limit") == 5
    assert total(rejections, "_total", reason="rate_limit", engine="0") == 5
    by_class = {
        (sample.labels["service_class"], sample.labels["reason"]): sample.value
        for sample in found["eventlm:class_requests_rejected"].samples
    }
    assert {key: value for key, value in by_class.items() if value} == {
        ("bronze", "queue_full"): 4,
        ("gold", "rate_limit"): 3,
    }
    assert {reason for name, reason in by_class if name == "gold"} == {"queue_full", "context_length", "rate_limit"}


def test_names_kinds_and_labels_are_those_of_the_dashboards(server: RunningServer) -> None:
    feed(server)
    found = scrape(server)
    vllm = {name: family for name, family in found.items() if name.startswith("vllm:")}
    assert {name for name, family in vllm.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in vllm.items() if family.type == "counter"} == COUNTERS
    assert {name for name, family in vllm.items() if family.type == "histogram"} == HISTOGRAMS.keys()
    for name, family in vllm.items():
        assert family.documentation
        for sample in family.samples:
            labels = {"model_name", "engine"} | EXTRA_LABELS.get(name, set())
            assert sample.labels.keys() - {"le"} == labels
            assert sample.labels["model_name"] == "fake"
        assert {sample.labels["engine"] for sample in family.samples} == {"0", "1"}
    assert all(name.startswith(("vllm:", "eventlm:", "process_", "http_")) for name in found)


def test_counters_end_in_total_and_no_sample_comes_twice(server: RunningServer) -> None:
    feed(server)
    seen = set()
    for family in scrape(server).values():
        for sample in family.samples:
            identity = (sample.name, tuple(sorted(sample.labels.items())))
            assert identity not in seen
            seen.add(identity)
            if family.type == "counter":
                assert sample.name == f"{family.name}_total"


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_buckets_are_those_of_the_dashboards(server: RunningServer, name: str) -> None:
    feed(server)
    family = scrape(server)[name]
    for engine in ("0", "1"):
        samples = [s for s in family.samples if s.labels["engine"] == engine and s.name == f"{name}_bucket"]
        assert [float(sample.labels["le"]) for sample in samples] == [*HISTOGRAMS[name], float("inf")]
        values = [sample.value for sample in samples]
        assert values == sorted(values)
        assert values[-1] == total(family, "_count", engine=engine)


def test_values_are_those_of_the_log(server: RunningServer) -> None:
    feed(server)
    found = scrape(server)
    snapshot = server.engine.store.snapshot()
    for engine, replica in enumerate(snapshot.replicas):
        labels = {"engine": str(engine)}
        assert total(found["vllm:generation_tokens"], "_total", **labels) == replica.generation_tokens > 0
        assert total(found["vllm:num_preemptions"], "_total", **labels) == sum(replica.preempt_reasons.values()) > 0
        assert total(found["vllm:prefix_cache_hits"], "_total", **labels) == replica.hit_tokens > 0
        ttft = replica.histograms["prefill_e2e_time"]
        family = found["vllm:time_to_first_token_seconds"]
        assert total(family, "_count", **labels) == sum(ttft.counts) > 0
        assert total(family, "_sum", **labels) == pytest.approx(ttft.total / 1e9)
    reasons = {
        reason: total(found["vllm:request_success"], "_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 6, "length": 4, "abort": 2, "error": 3}
    assert total(found["eventlm:events"], "_total") == snapshot.num_events
    assert total(found["eventlm:workers_lost"], "_total") == 3


def test_a_replica_of_several_ranks(server: RunningServer, tmp_path: Path) -> None:
    """Three replicas of three stages of three KV groups, one of which loses its worker before the end."""
    with LogWriter(real_system(), tmp_path, "run") as writer:
        Simulation(7, writer=writer, check_every=0).run()
    with LogReader(writer.path) as reader:
        for line in reader:
            server.engine.store.apply(line.event())
    server.engine.store.apply(
        WorkerLost(s=server.engine.store.next_s, ts=10**12, replica=2, epoch=10**6, reason="died", rank=8)
    )
    found = scrape(server)
    assert [total(found["eventlm:ranks_up"], engine=engine) for engine in "012"] == [9, 9, 0]
    sizes = {"tensor_parallel_size": "1", "pipeline_parallel_size": "3", "kv_parallel_size": "3"}
    assert total(found["eventlm:parallel_config_info"], **sizes) == 3
    (replica, *_) = server.engine.store.snapshot().replicas
    for stage in range(3):
        labels = {"engine": "0", "stage": str(stage)}
        for name in ("busy", "wait", "exchange"):
            seconds = total(found[f"eventlm:stage_{name}_seconds"], "_total", **labels)
            assert seconds == getattr(replica, f"stage_{name}_ns")[stage] / 1e9
        assert replica.stage_busy_ns[stage] > 0
    for group in range(3):
        labels = {"engine": "0", "kv_group": str(group)}
        assert total(found["eventlm:kv_group_tokens"], "_total", **labels) == replica.group_tokens[group] > 0
        assert total(found["eventlm:kv_group_blocks_used"], **labels) == 0


def test_of_one_process_there_is_nothing_on_ranks(server: RunningServer) -> None:
    feed(server)
    assert not [
        name
        for name in scrape(server)
        if name.startswith(("eventlm:ranks", "eventlm:parallel", "eventlm:stage", "eventlm:kv_group"))
    ]


def test_slack_may_be_negative(server: RunningServer) -> None:
    feed(server)
    family = scrape(server)["eventlm:deadline_slack_seconds"]
    bounds = [float(sample.labels["le"]) for sample in family.samples if sample.labels["engine"] == "0"]
    assert bounds[0] == -60
    assert 0.0 in bounds
    # A sum of such values is no counter: Prometheus wants none.
    assert {sample.name for sample in family.samples} == {"eventlm:deadline_slack_seconds_bucket"}


def test_openmetrics_where_it_is_asked_for(server: RunningServer) -> None:
    feed(server)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    reply = server.request("GET", "/metrics", headers={"Accept": accept})
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")
    assert reply.data.count(b"# EOF") == 1
    found = {family.name: family for family in parse_openmetrics(reply.data.decode())}
    assert total(found["vllm:generation_tokens"], "_total") > 0
    assert GAUGES | COUNTERS | HISTOGRAMS.keys() <= found.keys()


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text; version=x", "nonsense", "text/plain;version=1.0.0"]
)
def test_any_accept_header_gets_figures(server: RunningServer, accept: str) -> None:
    feed(server)
    reply = server.request("GET", "/metrics", headers={"Accept": accept})
    assert reply.status == 200
    assert b"\nvllm:num_requests_running{" in reply.data


def test_it_needs_no_key_and_no_ready_engine(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_key="secret")
    for state in ("loading", "draining", "dead"):
        server.engine.state = state  # type: ignore[assignment]
        found = scrape(server)
        assert total(found["eventlm:engine_state"], state=state) == 1
        assert total(found["eventlm:engine_state"]) == 1
        # Nothing is said of replicas before there is a log.
        assert not found["vllm:num_requests_running"].samples


def test_every_reason_to_finish_has_its_word_in_vllm() -> None:
    assert FINISHED_REASONS.keys() == set(FinishReason.__args__)  # type: ignore[attr-defined]


def test_a_value_on_a_bound_falls_below_it() -> None:
    histogram = Histogram.over((10, 20))
    for value in (0, 10, 11, 20, 21):
        histogram.observe(value)
    histogram.observe(15, 3)
    assert (histogram.counts, histogram.total, sum(histogram.counts)) == ([2, 5, 1], 107, 8)
