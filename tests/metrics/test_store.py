"""The metrics store: the same live and from the log, right by a plain reckoning, bounded, and honest about gaps."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import closed_segments
from eventlm.config import Config, CoreConfig, ModelConfig, RecordConfig, SchedulerConfig, WorkerConfig
from eventlm.core.core import Core
from eventlm.core.predictor import DEFAULT_COEFFICIENTS
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.replica import Replica
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import QueueFullError
from eventlm.engine.setup import make_setup
from eventlm.events import (
    Admitted,
    Arrived,
    Checkpoint,
    Emitted,
    Event,
    Fact,
    Finished,
    Header,
    Launched,
    Marker,
    StepCompleted,
    WorkerUp,
)
from eventlm.metrics.aggregates import MetricsSnapshot, ReplicaMetrics
from eventlm.metrics.live import LiveReplica, observe_step
from eventlm.metrics.rows import StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.rebuild import rebuild
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from tests.checkpoints import make_checkpoint
from tests.engine.engines import SLOW, Reader, generate, request, running
from tests.engine.metrics_oracle import fold, gaps, request_rows
from tests.replay.branch_runs import random_points
from tests.replay.golden import FOLDER, GOLDEN
from tests.replay.replicaset_runs import record_sets
from tests.simulation import Simulation

SEEDS = range(36)


def read(path: Path) -> list[Event]:
    with LogReader(path) as reader:
        return [line.event() for line in reader]


def log_of(seed: int, folder: Path) -> list[Event]:
    """The recorded events of a random workload."""
    with LogWriter(real_system(), folder, f"seed-{seed}") as writer:
        Simulation(seed, writer=writer, check_every=0).run()
    return read(writer.path)


def same(left: MetricsSnapshot, right: MetricsSnapshot) -> bool:
    """Equal to the last figure. (Compared as bytes, so that a difference of type would show.)"""
    return msgspec.json.encode(left) == msgspec.json.encode(right)


# --- live is the rebuilt one


@pytest.mark.parametrize("name", GOLDEN)
def test_live_equals_rebuilt_on_golden_traces(name: str, tmp_path: Path) -> None:
    golden = GOLDEN[name]
    machine = {"machine": golden.machine, "chaos": golden.chaos, "num_requests": golden.num_requests}
    assert_live_equals_rebuilt(tmp_path, golden.seed, machine)
    # What was just run is the golden trace itself.
    assert (tmp_path / "run" / "trace.jsonl").read_bytes().count(b"\n") == len(read(FOLDER / f"{name}.jsonl"))


@pytest.mark.parametrize("seed", SEEDS)
def test_live_equals_rebuilt_on_random_workloads(seed: int, tmp_path: Path) -> None:
    assert_live_equals_rebuilt(tmp_path, seed, {})


def assert_live_equals_rebuilt(folder: Path, seed: int, options: dict[str, Any]) -> None:
    live = MetricsStore()
    seen: dict[int, MetricsSnapshot] = {}

    def watch(event: Event) -> None:
        live.apply(event)
        if isinstance(event, Checkpoint):
            seen[event.s] = live.snapshot()

    with LogWriter(real_system(), folder, "run") as writer:
        simulation = Simulation(seed, writer=writer, check_every=0, **options)
        # It missed the header, which the engine core publishes as it is made.
        watch(read(writer.path)[0])
        simulation.engine_core.bus.attach(watch)
        simulation.run()
    rebuilt = MetricsStore()
    for event in read(writer.path):
        rebuilt.apply(event)
        if isinstance(event, Checkpoint):
            assert same(seen.pop(event.s), rebuilt.snapshot())
    assert not seen
    assert same(live.snapshot(), rebuilt.snapshot())
    assert live.num_live == 0


def test_live_equals_rebuilt_over_all_segments_of_a_run(tmp_path: Path) -> None:
    for seed in range(3):
        writer = LogWriter(real_system(), tmp_path, f"run-{seed}", segment_bytes=6000)
        with writer:
            simulation = Simulation(seed, writer=writer, check_every=0)
            live = MetricsStore()
            live.apply(read(writer.path)[0])
            simulation.engine_core.bus.attach(live.apply)
            simulation.run()
        assert len(closed_segments(writer.run_folder)) > 1
        store, _ = fold(read(writer.run_folder))
        assert same(live.snapshot(), store.snapshot())


def test_a_later_segment_alone_measures_what_begins_in_it(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=20_000) as writer:
        Simulation(3, writer=writer, check_every=0, num_requests=60).run()
    _, whole = fold(read(writer.run_folder))
    segment = closed_segments(writer.run_folder)[1].path
    events = read(segment)
    store, rows = fold(events)
    assert rows.requests
    assert rows.requests.items() <= whole.requests.items()
    snapshot = store.snapshot()
    assert snapshot.num_unseen > 0
    # Rates and shares of time are of what is measured, not of the run.
    assert 0 < snapshot.duration_ns == events[-1].ts - events[0].ts < events[-1].ts
    # Their workers came up before it.
    assert any(replica.is_up for replica in snapshot.replicas)


async def test_live_equals_rebuilt_of_an_engine_under_stress(tmp_path: Path) -> None:
    limits = {"max_queue_len": 4, "max_num_seqs": 2}
    async with running(record=tmp_path, replicas=2, fake=SLOW, **limits) as engine:
        readers = [
            Reader(handle, n=handle_n)
            for handle_n in (1, 2)
            for handle in await engine.submit([request(30, seed=handle_n, n=handle_n, deadline_ns=1)])
        ]
        with pytest.raises(QueueFullError):
            await engine.submit([request(8, n=8)])
        await readers[0].until_tokens(3)
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        readers[1].handle.cancel()
        for reader in readers:
            await reader.done()
        await generate(engine, request(6, has_text_ends=True))
        mid_run = engine.metrics()
        assert sum(mid_run.scheduling_time.counts) > 10
        assert mid_run.recorder is not None
        assert mid_run.recorder.num_bytes > 1000
        assert (mid_run.recorder.num_events_behind, mid_run.recorder.is_writing) == (0, True)
    metrics = engine.metrics().log
    assert engine.run_folder is not None
    store, rows = fold(read(engine.run_folder / "trace.jsonl"))
    assert same(metrics, store.snapshot())
    reasons = sum((Counter(replica.finish_reasons) for replica in metrics.replicas), Counter())
    assert reasons == {"length": 2, "cancelled": 2}
    assert metrics.replicas[0].reject_reasons == {"queue_full": 1}
    assert sum(replica.num_workers_lost for replica in metrics.replicas) >= 1
    assert sum(replica.num_deadlines_missed for replica in metrics.replicas) == 3
    assert len(rows.requests) == 4


async def test_live_equals_rebuilt_of_a_real_model_with_its_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch makes this folder as it is loaded.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    folder = make_checkpoint(tmp_path / "model")
    config = Config(
        model=ModelConfig(model=str(folder)),
        # Given, so that no warm-up is needed.
        scheduler=SchedulerConfig(predictor=list(DEFAULT_COEFFICIENTS)),
        worker=WorkerConfig(profile_ops=True, threads=1),
        record=RecordConfig(record=str(tmp_path / "runs")),
    )
    setup = make_setup(config, model=str(folder), model_name="m", num_blocks=64, max_model_len=512)
    engine = InferenceEngine(setup, real_system())
    await engine.start()
    try:
        group = [request(12, seed=seed, n=2, prompt=range(1, 40), has_text_ends=seed == 1) for seed in range(3)]
        await generate(engine, *group)
    finally:
        await engine.stop()
    metrics = engine.metrics().log
    assert engine.run_folder is not None
    store, _ = fold(read(engine.run_folder / "trace.jsonl"))
    assert same(metrics, store.snapshot())
    (replica,) = metrics.replicas
    assert sum(replica.finish_reasons.values()) == 6
    assert (replica.prompt_tokens, replica.hit_tokens) == (6 * 39, 5 * 32)
    assert {"qkv_proj", "attention", "down_proj", "lm_head", "sample"} <= replica.op_ns.keys()
    assert 0 < sum(replica.op_ns.values()) <= replica.busy_ns


# --- it is right


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces_as_reckoned_row_by_row(name: str) -> None:
    assert_as_reckoned(read(FOLDER / f"{name}.jsonl"))


@pytest.mark.parametrize("seed", range(100, 112))
def test_random_workloads_as_reckoned_row_by_row(seed: int, tmp_path: Path) -> None:
    assert_as_reckoned(log_of(seed, tmp_path))


def assert_as_reckoned(events: list[Event]) -> None:
    store, rows = fold(events)
    expected = request_rows(events)
    assert rows.requests.keys() == expected.keys()
    for identity, fields in expected.items():
        assert {name: getattr(rows.requests[identity], name) for name in fields} == fields
    counted: Counter[int] = Counter()
    for step in rows.steps:
        for gap_ns, num_rows in step.token_gaps:
            counted[gap_ns] += num_rows
    assert counted == gaps(events)
    snapshot = store.snapshot()
    emitted = [event for event in events if isinstance(event, Emitted)]
    assert sum(replica.generation_tokens for replica in snapshot.replicas) == sum(e.num_tokens for e in emitted)
    assert sum(replica.num_steps for replica in snapshot.replicas) == len(emitted)
    assert snapshot.num_events == len(events)
    assert_phases_add_up(rows.requests.values())


def assert_phases_add_up(rows: object) -> None:
    for row in rows:  # type: ignore[attr-defined]
        if row.request_execution_time is not None and row.request_e2e_time is not None:
            parts = (row.request_scheduling_delay, row.request_execution_time, row.request_preemption_time)
            assert all(part >= 0 for part in parts)
            assert sum(parts) <= row.request_e2e_time


@pytest.mark.parametrize("name", GOLDEN)
def test_gauges_are_those_of_the_core_at_every_tick(name: str) -> None:
    """Running, waiting and held blocks, which the core knows and the store only reads off the log."""
    assert_gauges_are_those_of_the_core(read(FOLDER / f"{name}.jsonl"))


def test_blocks_of_kv_groups_are_those_of_the_core(tmp_path: Path) -> None:
    events = log_of(7, tmp_path)
    assert isinstance(events[0], Header)
    assert events[0].core.groups == 3
    assert_gauges_are_those_of_the_core(events)


def assert_gauges_are_those_of_the_core(events: list[Event]) -> None:
    header = events[0]
    assert isinstance(header, Header)
    core = rebuild(header).new_core()
    store = MetricsStore()
    num_compared = 0
    for event, behind in zip(events, [*events[1:], None], strict=True):
        if isinstance(event, Fact | Marker):
            core.apply(event)
        store.apply(event)
        if (behind is None or isinstance(behind, Fact | Marker)) and not core.state.drain_open:
            num_compared += 1
            assert gauges_of(store.snapshot()) == gauges_in(core)
    assert num_compared > 40


def gauges_of(snapshot: MetricsSnapshot) -> list[object]:
    replicas = snapshot.replicas
    per_replica = [
        (each.is_up, each.num_running, each.group_held_blocks or [each.num_held_blocks]) for each in replicas
    ]
    return [per_replica, sum(replica.num_waiting for replica in replicas)]


def gauges_in(core: Core) -> list[object]:
    def held(replica: Replica) -> list[int]:
        pool = replica.pool
        return [pool.blocks_per_group - pool.available_in(group) for group in range(pool.num_groups)]

    per_replica = [(replica.up, len(replica.running), held(replica)) for replica in core.state.replicas]
    return [per_replica, core.state.num_waiting]


def test_a_request_counts_for_its_own_replicaset_also_if_it_never_ran(tmp_path: Path) -> None:
    store, rows = fold(events := read(record_sets(tmp_path, 0)))
    header = events[0]
    assert isinstance(header, Header)
    asked = {event.s: event.replicaset for event in events if isinstance(event, Arrived)}
    set_of = header.sets_of_replicas()
    unlaunched = [row for row in rows.requests.values() if row.request_scheduling_delay is None]
    assert any(asked[row.request] for row in unlaunched)
    assert [set_of[row.replica] for row in rows.requests.values()] == [
        asked[row.request] for row in rows.requests.values()
    ]
    counted: list[Counter[str]] = [Counter() for _ in header.sets]
    for number, replica in zip(set_of, store.snapshot().replicas, strict=True):
        counted[number] += Counter(replica.finish_reasons)
    ended = [event for event in events if isinstance(event, Finished)]
    branches = {event.s for event in events if isinstance(event, Arrived) and event.scheduling.is_branch}
    assert counted == [
        Counter(each.reason for each in ended if asked[each.request] == number and each.request not in branches)
        for number in range(len(header.sets))
    ]


# --- stages


def test_a_step_is_in_a_stage_or_waits_for_it_or_is_on_its_way() -> None:
    core = CoreConfig(models=["fake"], block_size=4, num_blocks=9, max_model_len=32, num_stages=3)
    replica = LiveReplica(ReplicaMetrics.of(core), core)
    steps = [
        # The first meets no other. The second is there before the second stage is free, and reaches the third late.
        [(0, 10), (12, 20), (20, 50)],
        [(10, 15), (21, 30), (55, 60)],
        # By the clock of its host the third stage begins before the second has ended.
        [(15, 25), (30, 40), (39, 49)],
    ]
    waits = []
    for stages in steps:
        waits.append(replica.stage_waits.take(stages))
        row = StepRow(
            replica=0,
            step=len(waits),
            completed_ns=stages[-1][1],
            batch_size=1,
            batch_num_tokens=1,
            batch_execution_time=stages[-1][1] - stages[0][0],
            busy_ns=30,
            predicted_ns=30,
            inter_batch_delay=None,
            tokens=[],
            token_gaps=[],
            stages=stages,
            stage_waits_ns=waits[-1],
        )
        observe_step(row, replica.metrics)
    assert waits == [[0, 0, 0], [0, 5, 20], [0, 5, 0]]
    metrics = replica.metrics
    assert metrics.stage_busy_ns == [25, 27, 45]
    assert metrics.stage_wait_ns == [0, 10, 20]
    assert metrics.stage_exchange_ns == [0, 3, 5]
    # After a loss nothing is waited for.
    replica.lose_worker()
    assert replica.stage_waits.take([(0, 1), (2, 3), (4, 5)]) == [0, 0, 0]
    assert replica.stage_waits.take([]) == []


# --- logs with holes


def test_a_log_whose_beginning_is_missing_measures_what_begins_in_it(tmp_path: Path) -> None:
    events = log_of(7, tmp_path)
    whole, rows = fold(events)
    middle = next(index for index, event in enumerate(events) if isinstance(event, Checkpoint) and index > 60)
    header = structs.replace(events[0], s=events[middle].s - 1, previous_h="0" * 16)
    store, later = fold([header, *events[middle:]])
    begun = {event.s for event in events[middle:] if isinstance(event, Arrived)}
    assert begun
    assert begun != {event.s for event in events if isinstance(event, Arrived)}
    finished = [event for event in events[middle:] if isinstance(event, Finished)]
    unseen = [event for event in finished if event.request not in begun]
    assert unseen
    assert store.snapshot().num_unseen == len(unseen)
    expected = {identity: row for identity, row in rows.requests.items() if identity[0] in begun}
    assert later.requests == expected
    assert store.num_live == 0
    assert whole.snapshot().num_unseen == 0


def test_lost_events_end_the_measurement_of_what_was_live(tmp_path: Path) -> None:
    events = log_of(7, tmp_path)
    before, _ = fold(events[:80])
    num_live = before.num_live
    assert num_live
    gap = [*events[:80], *events[120:]]
    store, rows = fold(gap)
    snapshot = store.snapshot()
    assert snapshot.num_cut == num_live
    assert store.num_live == 0
    for replica in snapshot.replicas:
        assert (replica.num_running, replica.num_waiting, replica.num_held_blocks) == (0, 0, 0)
    arrived_behind = {event.s for event in events[120:] if isinstance(event, Arrived)}
    ended_before = {event.request for event in events[:80] if isinstance(event, Finished)}
    assert {row.request for row in rows.requests.values()} <= arrived_behind | ended_before


def test_the_first_event_must_be_a_header() -> None:
    with pytest.raises(ValueError, match="begins with event 5"):
        MetricsStore().apply(WorkerUp(s=5, replica=0, epoch=1))


# --- it is bounded


def one_by_one(num_requests: int, header: Header) -> Iterator[Event]:
    """A run of requests of one prompt token and two outputs, each after the other; no trace holds it."""
    yield header
    yield WorkerUp(s=1, ts=1, replica=0, epoch=1, p=1)
    s = 2
    for step in range(0, 2 * num_requests, 2):
        request_s, ts = s, s * 1000
        yield Arrived(
            s=s, ts=ts, prompt_tokens=1, max_tokens=2, p=1, scheduling=SchedulingParams(model="m", received_ns=ts - 10)
        )
        yield Admitted(s=s + 1, ts=ts, c=s, request=s)
        chunk = [(request_s, 0, 0, 1, 1)]
        decode = [(request_s, 0, 2, 0)]
        blocks = [(0, 0, [0])]
        common = {"replica": 0, "epoch": 1}
        yield Launched(s=s + 2, ts=ts, step=step, chunks=chunk, blocks=blocks, num_tokens=1, predicted_ns=1, **common)
        done = {"start_ns": ts, "end_ns": ts + 5, "produced": [1], "p": 1} | common
        yield StepCompleted(s=s + 3, ts=ts + 10, c=s + 2, step=step, **done)
        yield Emitted(s=s + 4, ts=ts + 10, replica=0, step=step, num_tokens=1)
        yield Launched(s=s + 5, ts=ts + 10, step=step + 1, decodes=decode, num_tokens=1, predicted_ns=1, **common)
        yield StepCompleted(s=s + 6, ts=ts + 20, c=s + 5, step=step + 1, **done)
        yield Emitted(s=s + 7, ts=ts + 20, replica=0, step=step + 1, num_tokens=1)
        yield Finished(s=s + 8, ts=ts + 20, request=request_s, index=0, reason="length", position=2)
        s += 9


def num_objects(store: MetricsStore) -> int:
    """Objects that the garbage collector knows of and that are reachable from the store, but for code."""
    seen: set[int] = set()
    pending: list[object] = [vars(store)]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        pending += gc.get_referents(item)
    return len(seen)


def test_the_store_does_not_grow_with_the_run() -> None:
    header = read(FOLDER / "fcfs_one_replica.jsonl")[0]
    assert isinstance(header, Header)
    sizes = []
    for num_requests in (20, 2000):
        store = MetricsStore()
        for event in one_by_one(num_requests, header):
            store.apply(event)
        snapshot = store.snapshot()
        assert snapshot.replicas[0].finish_reasons == {"length": num_requests}
        assert snapshot.replicas[0].histograms["prefill_e2e_time"].total == 20 * num_requests
        assert snapshot.replicas[0].histograms["decode_token_execution_plus_preemption_time"].total == 10 * num_requests
        sizes.append(num_objects(store))
    # Integers beyond the small ones are objects too, one for each figure at most.
    assert sizes[1] - sizes[0] < 200


@pytest.mark.parametrize("name", ["fcfs_one_replica", "edf_tight", "fcfs_recurrent"])
def test_from_a_snapshot_on_it_counts_what_it_would_have_counted(name: str) -> None:
    path = FOLDER / f"{name}.jsonl"
    events = read(path)
    header = events[0]
    assert isinstance(header, Header)
    whole = MetricsStore()
    points = {point.s: point for point in random_points(path, 6, random.Random(2))}
    stores: list[MetricsStore] = []
    for event in events:
        whole.apply(event)
        for store in stores:
            store.apply(event)
            assert [each.num_running + each.num_waiting for each in store.gauges] == [
                each.num_running + each.num_waiting for each in whole.gauges
            ]
        if event.s in points:
            state = points[event.s].state
            stores.append(MetricsStore())
            stores[-1].take_up(header, state, launches_in_flight(state))
            assert stores[-1].num_live == whole.num_live
    assert len(stores) == 6
    for store in stores:
        assert store.snapshot().num_unseen == 0
        assert [each.num_held_blocks for each in store.gauges] == [0] * len(store.gauges)
