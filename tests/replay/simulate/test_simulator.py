"""Simulated runs: what they write verifies, and whatever depends on something comes when that has happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.config import CoreConfig
from eventlm.core.predictor import DEFAULT_COEFFICIENTS
from eventlm.engine.plugins.registry import resolve
from eventlm.events import (
    Arrived,
    Cancelled,
    Desynced,
    Emitted,
    Event,
    Fact,
    Finished,
    Header,
    Launched,
    StepCompleted,
    TimerDue,
    WorkerLost,
    WorkerUp,
)
from eventlm.events.codec import encode_body
from eventlm.replay.cost.model import LinearCost, Overheads
from eventlm.replay.rebuild import rebuild
from eventlm.replay.simulate.simulator import Simulator
from eventlm.replay.simulate.timing import ModelledTiming, timings
from eventlm.replay.verify.verifier import verify
from eventlm.replay.workload.workload import Cancel, Patience, SequenceOutput, TextEnd, Workload, WorkloadRequest
from eventlm.system.system import real_system
from tests.made_requests import changed, make_arrival

COST = LinearCost(base_ps=2_000_000_000, prefill_ps=10_000_000, decode_ps=20_000_000, context_ps=10_000)
MILLISECOND = 1_000_000


def header_of(policy: str = "fcfs", batcher: str = "fixed", **core: Any) -> Header:
    config: dict[str, Any] = {"num_blocks": 200, "max_model_len": 2000, "max_num_seqs": 8} | core
    plugins = [resolve("policy", {"type": policy}), resolve("batcher", {"type": batcher})]
    plugins.append(resolve("router", {"type": "pull"}))
    return Header(
        run="simulated",
        unix_start_ns="0",
        code_version="0",
        core=CoreConfig(models=["m"], **config),
        plugins=[plugin.record for plugin in plugins],
        predictor=list(DEFAULT_COEFFICIENTS),
    )


def request(arrival_ms: int, prompt: int = 100, output: int = 10, **fields: Any) -> WorkloadRequest:
    names = {name: fields.pop(name) for name in list(fields) if name in ("blocks", "has_text_ends", "n", "priority")}
    arrival = make_arrival(model="", prompt_tokens=prompt, max_tokens=output, **names)
    fields = {"outputs": [SequenceOutput(num_tokens=output)]} | fields
    return WorkloadRequest(arrival=arrival, arrival_ns=arrival_ms * MILLISECOND, **fields)


def simulate(
    requests: list[WorkloadRequest],
    header: Header | None = None,
    *,
    external_facts: list[Fact] | None = None,
    **how: Any,
) -> tuple[Simulator, list[Event]]:
    header = header or header_of()
    events: list[Event] = []
    timing = ModelledTiming(timings(header.sets, [how.pop("cost", COST)]))
    ups: list[Fact] = [WorkerUp(replica=index, epoch=1) for index in range(header.core.num_replicas)]
    workload = Workload(source="test", requests=requests, block_size=16, first_free_name=1 << 20)
    simulator = Simulator(
        header,
        rebuild(header).new_core(),
        workload,
        timing,
        external_facts=[*ups, *(external_facts or [])],
        subscribers=[events.append],
        **how,
    )
    simulator.run()
    simulator.end()
    return simulator, events


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def random_requests(seed: int, count: int = 60) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    now_ms = 0
    found = []
    for index in range(count):
        now_ms += rng.choice([0, 1, 5, 40])
        prompt, output = rng.choice([5, 40, 300, 900]), rng.randint(1, 40)
        fields: dict[str, Any] = {}
        sequence_output = SequenceOutput(num_tokens=output)
        if rng.random() < 0.3:
            sequence_output = SequenceOutput(worker_end=rng.randint(1, output))
        if rng.random() < 0.3:
            fields["has_text_ends"] = True
            text_end = TextEnd(position=rng.randint(0, output), reason="stop", delay_ns=rng.randint(1, 9 * MILLISECOND))
            sequence_output = structs.replace(sequence_output, text_end=text_end)
        if rng.random() < 0.2:
            fields["cancel"] = Cancel(
                index=0, position=rng.randint(0, output), delay_ns=rng.randint(0, 9) * MILLISECOND
            )
        if index and rng.random() < 0.3:
            fields |= {"parent": rng.randrange(index), "think_ns": rng.choice([None, 0, 50 * MILLISECOND])}
        fields["priority"] = rng.choice([0, 0, 1])
        fields["blocks"] = [rng.choice([1, 1000 + index]) * 100 + i for i in range(prompt // 16)]
        found.append(request(now_ms, prompt, output, outputs=[sequence_output], **fields))
    return found


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs"])
@pytest.mark.parametrize("batcher", ["fixed", "dynamic"])
def test_simulated_runs_verify(tmp_path: Path, policy: str, batcher: str) -> None:
    header = header_of(policy, batcher, num_replicas=2, num_blocks=70, max_model_len=1000, max_num_batched_tokens=256)
    lost = [WorkerLost(ts=90 * MILLISECOND, replica=0, epoch=1), WorkerUp(ts=95 * MILLISECOND, replica=0, epoch=2)]
    simulator, events = simulate(random_requests(3), header, external_facts=lost)
    assert (simulator.num_unfinished, simulator.num_ended) == (0, 60)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        for event in events:
            writer.append(encode_body(event))
    result = verify(writer.run_folder, check_invariants=True)
    assert result.divergence is None
    assert result.num_decisions > 100
    assert result.warnings == []


def test_two_simulations_are_the_same() -> None:
    first, second = (list(map(encode_body, simulate(random_requests(5))[1])) for _ in range(2))
    assert first == second


def test_a_step_waits_for_its_launch_and_for_the_one_before() -> None:
    overheads = Overheads(dispatch_ns=300_000, between_ns=50_000, report_ns=70_000)
    _, events = simulate([request(0), request(1)], cost=structs.replace(COST, overheads=overheads))
    launches = {event.s: event for event in of(events, Launched)}
    before_ns = -1
    for step in of(events, StepCompleted):
        earliest_ns = launches[step.c].ts + 300_000
        assert step.start_ns == max(earliest_ns, before_ns + 50_000 if before_ns >= 0 else 0)
        assert step.ts == step.end_ns + 70_000
        before_ns = step.end_ns


@pytest.mark.parametrize(
    "word", [WorkerUp(replica=0, epoch=2), WorkerLost(replica=0, epoch=2), Desynced(replica=0, epoch=1, step=0)]
)
def test_word_of_an_older_worker_does_not_set_the_present_one_free(word: Fact) -> None:
    # Where arrivals come closer together, a worker that started slowly comes up behind the one that took its place.
    ups = [WorkerUp(ts=MILLISECOND, replica=0, epoch=3), structs.replace(word, ts=20 * MILLISECOND)]
    simulator, events = simulate([request(2), request(2, prompt=900, output=30)], external_facts=ups)
    assert simulator.num_ended == 2
    before_ns = 0
    for step in of(events, StepCompleted):
        assert step.start_ns >= before_ns
        before_ns = step.end_ns
    assert before_ns > 30 * MILLISECOND


def test_lengths_and_ends() -> None:
    outputs = [SequenceOutput(worker_end=4, worker_reason="stop_token"), SequenceOutput()]
    _, events = simulate([request(0, output=10, n=2, outputs=outputs)])
    assert [(e.index, e.reason, e.position) for e in of(events, Finished)] == [(0, "stop_token", 4), (1, "length", 10)]


def test_a_cancel_follows_the_progress() -> None:
    """Twice as slow a machine: the same tokens are seen before the cancel, whatever time that takes."""
    cancel = Cancel(index=0, position=5, delay_ns=1000)
    for factor in (1, 2):
        _, events = simulate([request(0, output=50, cancel=cancel)], cost=LinearCost(base_ps=factor * 10**10))
        (found,) = of(events, Cancelled)
        emitted = [event for event in of(events, Emitted) if event.num_tokens]
        assert found.ts == emitted[4].ts + 1000
        assert of(events, Finished)[0].reason == "cancelled"


def test_an_impatient_client_leaves_at_its_time_unless_it_has_a_first_token() -> None:
    """On a machine twice as slow the first token comes too late, and the client leaves at the same time."""
    patience = Patience(limit_ns=15 * MILLISECOND)
    for factor, is_left in ((1, False), (2, True)):
        cost = LinearCost(base_ps=factor * 10 * MILLISECOND * 1000)
        _, events = simulate([request(7, output=50, patience=patience)], cost=cost)
        assert [event.ts for event in of(events, Cancelled)] == [(7 + 15) * MILLISECOND] * is_left
        assert [event.reason for event in of(events, Finished)] == ["cancelled" if is_left else "length"]


def test_turns_follow_each_other() -> None:
    think_ns = 20 * MILLISECOND
    requests = [request(0), request(1, parent=0, think_ns=think_ns), request(2, parent=1), request(900, parent=0)]
    simulator, events = simulate(requests)
    ends = {simulator.workload_index[event.request]: event.ts for event in of(events, Finished)}
    arrivals = {simulator.workload_index[event.s]: event.ts for event in of(events, Arrived)}
    assert arrivals[1] == ends[0] + think_ns
    assert arrivals[2] == ends[1] + 1  # as soon as possible: the next tick
    assert arrivals[3] == 900 * MILLISECOND


@pytest.mark.parametrize("clients", [1, 3, 100])
def test_closed_loop(clients: int) -> None:
    _, events = simulate(random_requests(7), closed_loop=clients)
    live = most = 0
    for event in events:
        live += isinstance(event, Arrived)
        live -= isinstance(event, Finished)
        most = max(most, live)
    assert live == 0
    assert most == min(clients, 60)


def cached_tokens(header: Header, workload: Workload) -> list[int]:
    """Of each sequence, in the order in which they end."""
    events: list[Event] = []
    simulator = Simulator(
        header, rebuild(header).new_core(), workload, ModelledTiming(timings(header.sets, [COST])),
        external_facts=[WorkerUp(replica=0, epoch=1)], subscribers=[events.append],
    )  # fmt: skip
    simulator.run()
    return [event.cached_tokens for event in of(events, Finished)]


def test_blocks_of_another_size_are_hit() -> None:
    """Two prompts of 1,024 equal tokens, named in blocks of 512; the second one comes when the first has ended."""
    header = header_of()
    workload = Workload(
        source="", requests=[request(0, 1030, blocks=[1, 2, 3]), request(500, 1030, blocks=[1, 2, 4])],
        block_size=512, first_free_name=5,
    )  # fmt: skip
    assert cached_tokens(header, workload) == [0, 1024]


@pytest.mark.parametrize("block_size", [8, 32])
def test_what_a_turn_generates_is_hit_in_blocks_of_another_size(block_size: int) -> None:
    """50 tokens and an answer of 60 fill six blocks of 16; the next turn begins with them."""
    sequence_output = SequenceOutput(num_tokens=60, reason="length", blocks=[4, 5, 6])
    first = structs.replace(request(0, 50, output=60, blocks=[1, 2, 3]), outputs=[sequence_output])
    second = request(5000, 140, output=1, blocks=[*range(1, 7), 11, 12])
    header = header_of(block_size=block_size)
    workload = Workload(source="", requests=[first, second], block_size=16, first_free_name=13)
    assert cached_tokens(header, workload) == [0, 96]


def test_a_timer_that_was_overtaken_fires_once() -> None:
    def dropped(arrival_ms: int, deadline_ms: int) -> WorkloadRequest:
        late = request(arrival_ms)
        deadlines = {"deadline_ns": deadline_ms * MILLISECOND, "drop_if_late": True}
        return structs.replace(late, arrival=changed(late.arrival, **deadlines))

    # Nobody is served. The second one's timer comes before the first one's, which is armed again behind it.
    lost: list[Fact] = [WorkerLost(ts=0, replica=0, epoch=1)]
    _, events = simulate([dropped(1, 900), dropped(2, 300), dropped(3, 600)], external_facts=lost)
    assert [end.reason for end in of(events, Finished)] == ["deadline"] * 3
    timers = of(events, TimerDue)
    assert len(timers) == 3
    assert [end.c for end in of(events, Finished)] == [timer.s for timer in timers]


def test_nothing_goes_on_without_a_worker() -> None:
    lost = [WorkerLost(ts=10 * MILLISECOND, replica=0, epoch=1)]
    simulator, _ = simulate([request(0, output=500), request(50)], external_facts=lost)
    assert simulator.num_unfinished == 2
