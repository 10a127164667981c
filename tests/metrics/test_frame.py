"""Frames: the differences of snapshots, their percentiles, and that a recording gives those that were seen live."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.config import CoreConfig
from eventlm.core.shards import Layout
from eventlm.engine.request import QueueFullError
from eventlm.events import Event, Finished
from eventlm.metrics.aggregates import ClassMetrics, MetricsSnapshot, ReplicaMetrics
from eventlm.metrics.frame import Frame, Percentiles, StageFrame, frame, recorded_frames
from eventlm.metrics.histograms import make_histograms
from eventlm.metrics.store import MetricsStore
from eventlm.types import NANOSECONDS_PER_MILLISECOND as MS
from eventlm.types import NANOSECONDS_PER_SECOND as SECOND
from tests.engine.engines import Reader, recorded, request, running
from tests.replay.golden import FOLDER, GOLDEN


def replica(**fields: int) -> ReplicaMetrics:
    return ReplicaMetrics(histograms=make_histograms(512), **fields)  # type: ignore[arg-type]


def snapshot(*replicas: ReplicaMetrics, **fields: Any) -> MetricsSnapshot:
    return structs.replace(MetricsSnapshot(num_blocks=10, replicas=[each.copy() for each in replicas]), **fields)


def test_rates_are_of_all_replicas_and_of_the_interval() -> None:
    first = replica(generation_tokens=100, prompt_tokens=7, queried_tokens=50, hit_tokens=50, num_steps=4)
    second = replica(generation_tokens=5, is_up=True)
    before = snapshot(first, second, num_requests=3)
    first.generation_tokens, first.queried_tokens, first.hit_tokens, first.num_held_blocks = 160, 90, 60, 4
    second.generation_tokens, second.busy_ns, second.num_steps, second.num_waiting = 10, SECOND, 2, 6
    second.preempt_reasons["memory"] = 2
    first.reject_reasons["queue_full"] = 1
    first.finish_reasons.update({"eos": 3, "length": 1})
    found = frame(before, snapshot(first, second, num_requests=13), start_ns=SECOND, end_ns=3 * SECOND)
    assert (found.requests_per_s, found.generation_tokens_per_s, found.prompt_tokens_per_s) == (5.0, 32.5, 0.0)
    assert (found.hit_percent, found.num_blocks, found.num_held_blocks, found.num_waiting) == (25.0, 20, 4, 6)
    assert (found.preempted, found.rejected, found.finished) == (
        {"memory": 2},
        {"queue_full": 1},
        {"eos": 3, "length": 1},
    )
    assert [each.generation_tokens_per_s for each in found.replicas] == [30.0, 2.5]
    assert [each.busy_percent for each in found.replicas] == [0.0, 50.0]
    assert [(each.num_steps, each.num_preemptions, each.is_up) for each in found.replicas] == [
        (0, 0, False),
        (2, 2, True),
    ]


def test_stages_and_kv_groups_are_those_of_their_replica() -> None:
    core = CoreConfig(
        models=["fake"], block_size=4, num_blocks=9, max_model_len=32, num_stages=2, num_kv_groups=2, kv_shard_tokens=4
    )
    one = ReplicaMetrics.of(core)
    layout = {"num_blocks": 18, "layout": Layout(tensor=2, stages=2, groups=2)}
    before = snapshot(one, **layout)
    one.num_steps += 4
    one.stage_busy_ns, one.stage_wait_ns, one.stage_exchange_ns = [SECOND, SECOND // 2], [0, 40], [0, 8]
    one.group_tokens, one.group_held_blocks = [10, 30], [3, 1]
    expected = [StageFrame(busy_percent=50.0, wait_ns=0, exchange_ns=0)]
    expected.append(StageFrame(busy_percent=25.0, wait_ns=10, exchange_ns=2))
    for earlier in (before, MetricsSnapshot()):
        (found,) = frame(earlier, snapshot(one, **layout), start_ns=0, end_ns=2 * SECOND).replicas
        assert found.ranks == "2 stages of 2 KV groups of 2 tensor ranks"
        assert found.stages == expected
        groups = [(each.num_held_blocks, each.num_blocks, each.tokens_per_s) for each in found.kv_groups]
        assert groups == [(3, 9, 5.0), (1, 9, 15.0)]
    (found,) = frame(before, before, start_ns=0, end_ns=0).replicas
    assert found.stages == [StageFrame(busy_percent=None, wait_ns=None, exchange_ns=None)] * 2
    # One process has none of it.
    (found,) = frame(MetricsSnapshot(), snapshot(replica()), start_ns=0, end_ns=SECOND).replicas
    assert not {"ranks", "stages", "kv_groups"} & msgspec.to_builtins(found).keys()


def test_no_time_and_no_data_are_no_figures() -> None:
    one = snapshot(replica(num_running=2))
    found = frame(one, one, start_ns=5, end_ns=5)
    assert (found.generation_tokens_per_s, found.hit_percent, found.num_running) == (None, None, 2)
    assert found.ttft_ns == Percentiles(count=0)
    assert found.replicas[0].busy_percent is None


def test_before_the_header_there_are_no_replicas() -> None:
    late = replica(generation_tokens=8)
    late.histograms["batch_size"].observe(4)
    found = frame(MetricsSnapshot(), snapshot(late), start_ns=0, end_ns=SECOND)
    assert (found.generation_tokens_per_s, found.batch_size.count) == (8.0, 1)
    assert frame(MetricsSnapshot(), MetricsSnapshot(), start_ns=0, end_ns=SECOND).replicas == []


def test_percentiles_are_of_the_new_values_and_interpolated() -> None:
    one = replica()
    ttft = one.histograms["prefill_e2e_time"]
    ttft.observe(70 * SECOND, 1000)
    before = snapshot(one)
    # 90 between 5 and 10 ms, 10 between 80 and 100 ms.
    ttft.observe(6 * MS, 90)
    ttft.observe(95 * MS, 10)
    found = frame(before, snapshot(one), start_ns=0, end_ns=SECOND).ttft_ns
    assert (found.count, found.mean) == (100, (90 * 6 + 10 * 95) * MS // 100)
    assert found.p50 == 5 * MS + 5 * MS * 50 // 90
    assert found.p90 == 10 * MS
    assert found.p99 == 98 * MS


@pytest.mark.parametrize("value", [1, 10**9 * 9999])
def test_percentiles_of_the_first_bucket_and_of_what_is_beyond_the_last(value: int) -> None:
    one = replica()
    before = snapshot(one)
    one.histograms["prefill_e2e_time"].observe(value)
    found = frame(before, snapshot(one), start_ns=0, end_ns=SECOND).ttft_ns
    assert found.p50 == (MS // 2 if value == 1 else 2560 * SECOND)


def test_a_class_that_is_new_counts_from_nothing() -> None:
    gold = ClassMetrics(num_requests=4, output_tokens=30, num_slo_met=1, reject_reasons={"queue_full": 2})
    gold.ttft.observe(MS)
    after = structs.replace(snapshot(replica()), classes={"gold": gold})
    found = frame(snapshot(replica()), after, start_ns=0, end_ns=2 * SECOND).classes["gold"]
    assert (found.requests_per_s, found.output_tokens_per_s, found.num_rejected, found.num_slo_met) == (2.0, 15.0, 2, 1)
    assert found.ttft_ns.count == 1
    assert frame(after, after, start_ns=0, end_ns=SECOND).classes["gold"].num_rejected == 0


def events_of(path: Path) -> list[Event]:
    with LogReader(path) as reader:
        return [line.event() for line in reader]


@pytest.mark.parametrize("name", sorted(name for name in GOLDEN))
def test_the_frames_of_a_recording_add_up_to_it(name: str) -> None:
    events = events_of(FOLDER / f"{name}.jsonl")
    last_ns = events[-1].ts
    times = [0, *range(events[0].ts, last_ns, max(last_ns // 7, 1)), last_ns, last_ns + SECOND]
    frames = list(recorded_frames(events, times))
    assert len(frames) == len(times) - 1
    store = MetricsStore()
    for event in events:
        store.apply(event)
    whole = store.snapshot()
    finished = sum(sum(each.finished.values()) for each in frames)
    assert finished == sum(sum(each.finish_reasons.values()) for each in whole.replicas)
    assert sum(each.ttft_ns.count for each in frames) == sum(
        sum(each.histograms["prefill_e2e_time"].counts) for each in whole.replicas
    )
    assert (frames[-1].finished, frames[-1].generation_tokens_per_s) == ({}, 0.0)
    assert any(isinstance(event, Finished) for event in events)


async def test_live_frames_are_those_of_the_recording(tmp_path: Path) -> None:
    """Frames seen while requests of two classes run, one of which is refused, are found again in the trace."""
    async with running(record=tmp_path, max_queue_len=4, max_num_seqs=2) as engine:
        seen = [await engine.read_metrics()]
        readers = []
        for size, service_class in [(4, ""), (4, "gold"), (1, "gold")]:
            group = [request(40, seed=index, service_class=service_class) for index in range(size)]
            with contextlib.suppress(QueueFullError):
                readers += [Reader(handle) for handle in await engine.submit(group)]
            await readers[0].until_tokens(len(readers[0].tokens[0]) + 3)
            seen.append(await engine.read_metrics())
        for reader in readers:
            await reader.done()
        seen.append(await engine.read_metrics())
    live: list[Frame] = [
        frame(before.log, after.log, start_ns=before.now_ns, end_ns=after.now_ns) for before, after in pairwise(seen)
    ]
    assert live == list(recorded_frames(recorded(engine), [each.now_ns for each in seen]))
    # Requests of a class are counted by request, and so are those that were turned away.
    assert [each.rejected for each in live] == [{}, {"queue_full": 4}, {}, {}]
    assert [each.classes["gold"].num_rejected for each in live[1:]] == [4, 0, 0]
    assert sum(each.ttft_ns.count for each in live) == len(readers)
    assert sum((each.generation_tokens_per_s or 0) > 0 for each in live) >= 2
