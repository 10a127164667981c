"""The line in the log every few seconds of work: its figures, when it comes, and when it does not."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.config import LogConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.events import Checkpoint
from eventlm.metrics.aggregates import BackendMetrics, MetricsSnapshot, ReplicaMetrics
from eventlm.metrics.store import MetricsStore
from eventlm.metrics.throughput_log import ThroughputLog
from eventlm.system.system import real_system
from tests.engine.engines import SLOW, fake_setup, generate, request


class Store:
    """A store of two replicas whose figures a test sets."""

    def __init__(self) -> None:
        self.num_live = 0
        self.forwards = False
        self.replicas = [ReplicaMetrics(histograms={}), ReplicaMetrics(histograms={})]

    def snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(num_blocks=200, replicas=self.replicas, forwards=self.forwards)


class Played:
    """The log of a store, with events at times in seconds."""

    def __init__(self, *, interval_s: int = 10) -> None:
        self.store = Store()
        self._log = ThroughputLog(cast(MetricsStore, self.store), interval_s=interval_s)

    def at(self, seconds: float, *, num_live: int) -> list[dict[str, Any]]:
        """An event after which so many sequences live; the lines that it led to."""
        self.store.num_live = num_live
        with capture_logs() as lines:
            self._log.observe(Checkpoint(ts=round(seconds * 1e9), digests={}))
        return cast(list[dict[str, Any]], lines)


def test_figures_are_of_the_interval_and_of_all_replicas() -> None:
    played = Played()
    assert played.at(1, num_live=5) == []
    first, second = played.store.replicas
    first.num_running, first.num_waiting, first.num_held_blocks = 3, 1, 100
    second.num_running, second.num_waiting, second.num_held_blocks = 1, 0, 1
    first.prompt_tokens, first.generation_tokens, first.queried_tokens, first.hit_tokens = 700, 1000, 300, 60
    second.prompt_tokens, second.generation_tokens, second.queried_tokens, second.hit_tokens = 33, 234, 100, 0
    assert played.at(10.9, num_live=5) == []
    assert played.at(11, num_live=5) == [
        {
            "event": "throughput",
            "log_level": "info",
            "running": 4,
            "waiting": 1,
            "prompt_tokens_per_s": 73.3,
            "generation_tokens_per_s": 123.4,
            "kv_cache_usage_percent": 25.2,
            "prefix_cache_hit_percent": 15.0,
        }
    ]
    second.generation_tokens += 50
    [line] = played.at(23.5, num_live=0)
    assert (line["prompt_tokens_per_s"], line["generation_tokens_per_s"]) == (0.0, 4.0)
    assert line["prefix_cache_hit_percent"] == 0.0


def test_of_other_servers_it_says_how_many_are_up_and_no_blocks() -> None:
    played = Played()
    played.at(0, num_live=1)
    first, second = played.store.replicas
    played.store.forwards = True
    first.backend, second.backend = BackendMetrics(failures={"server": 2, "connect": 1}), BackendMetrics()
    first.is_up = True
    [line] = played.at(10, num_live=1)
    assert (line["backends_up"], line["failed_attempts"]) == ("1/2", 3)
    assert "kv_cache_usage_percent" not in line
    second.backend.failures["server"] = 4
    second.backend.down_reason, second.is_up = "removed", False
    [line] = played.at(20, num_live=1)
    assert (line["backends_up"], line["failed_attempts"]) == ("1/1", 0)


def test_idle_time_is_silent_and_does_not_count() -> None:
    played = Played()
    assert played.at(0, num_live=0) == []
    assert played.at(1000, num_live=1) == []
    assert played.at(1004, num_live=0) == []
    assert played.at(5000, num_live=0) == []
    assert played.at(5001, num_live=2) == []
    played.store.replicas[0].generation_tokens = 100
    assert played.at(5006, num_live=2) == []
    assert [line["generation_tokens_per_s"] for line in played.at(5007, num_live=2)] == [10.0]


@pytest.mark.parametrize(("interval_s", "num_lines"), [(1, 1), (0, 0)])
async def test_an_engine_logs_as_often_as_it_is_configured_to(interval_s: int, num_lines: int) -> None:
    setup = fake_setup(fake=SLOW)
    config = structs.replace(setup.config, log=LogConfig(log_stats_interval_s=interval_s))
    engine = InferenceEngine(structs.replace(setup, config=config), real_system())
    await engine.start()
    with capture_logs() as lines:
        await generate(engine, request(60))
    await engine.stop()
    found = [line for line in lines if line["event"] == "throughput"]
    assert len(found) == num_lines
    for line in found:
        assert (line["running"], line["waiting"]) == (1, 0)
        assert 0 < line["generation_tokens_per_s"] <= 50
