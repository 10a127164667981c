"""Explanations of single requests: at the edge, cut, across a gap, rejected, divergent, or not there."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.events import Arrived, Event, Launched
from eventlm.events.codec import decode_body
from eventlm.replay.explain.explainer import explain
from eventlm.replay.verify.divergence import as_object
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.system.clock import SystemClock
from eventlm.system.system import real_system
from tests.bus.slow_disk import SlowDisk
from tests.replay.explained_logs import OFTEN, check_against_metrics, check_steps, check_sums, read
from tests.replay.golden import BROKEN, FOLDER
from tests.replay.traces import CALM, record, small_machine, tampered
from tests.simulation import Simulation


def test_a_trace_that_diverges_is_not_explained_beyond_that() -> None:
    path = FOLDER / f"{BROKEN}.jsonl"
    requests = read(path).requests
    with pytest.raises(DivergenceError, match=r"diverges from its replay: at event .* shows details") as raised:
        explain(path, requests)
    assert raised.value.exit_code == 10
    # What ended before it is verified.
    with LogReader(path) as reader:
        ended = next(event.request for line in reader if (event := line.event()).__class__.__name__ == "Finished")
    assert explain(path, [(ended, None)]).explanations[0].outcome == "length"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("calm"), small_machine({"type": "fcfs"}, max_num_seqs=2))


def test_time_at_the_edge_and_between_engine_and_worker(calm: Path, tmp_path: Path) -> None:
    """Workers that start later and end earlier than the engine hears of it, and requests that were received earlier."""

    def change(objects: list[dict[str, Any]]) -> None:
        for index, item in enumerate(objects):
            if item["t"] == "done":
                item["start_ns"] += 50_000
                item["end_ns"] -= 70_000
            elif item["t"] == "arrive":
                item["scheduling"] |= {"received_ns": item["ts"] - 3000, "ready_ns": item["ts"] - 1000}
                # Fields have their order in a line.
                objects[index] = as_object(decode_body(msgspec.json.encode(item)[:-1]))

    log = read(tampered(calm, tmp_path / "t", change))
    causes: Counter[str] = Counter()
    for explanation in explain(log.path, log.requests).explanations:
        check_sums(explanation)
        check_against_metrics(explanation, log.rows[explanation.request, explanation.index])
        if not explanation.preemptions:
            check_steps(explanation, log)
        edge = explanation.intervals[:2]
        assert [(each.phase, each.cause) for each in edge] == [("edge", "tokenizing"), ("edge", "stamping")]
        assert [each.duration_ns for each in edge] == [2000, 1000]
        for interval in explanation.intervals:
            causes[interval.cause] += 1
            if interval.cause == "return":
                assert interval.duration_ns == 70_000
            elif interval.cause == "dispatch":
                # Behind a launch into an idle worker, or behind the step before, or of that until it was preempted.
                assert interval.duration_ns in (50_000, 49_999, 120_000, 70_000)
    assert causes["return"] >= OFTEN
    assert causes["dispatch"] >= OFTEN


def test_up_to_the_end_of_a_log_that_was_cut(calm: Path, tmp_path: Path) -> None:
    log = read(calm)
    slowest = max(log.rows.values(), key=lambda row: row.request_e2e_time)
    middle_ns = slowest.arrived_ns + slowest.request_e2e_time // 2

    def cut(objects: list[dict[str, Any]]) -> None:
        del objects[next(index for index, item in enumerate(objects) if item["ts"] > middle_ns) :]

    found = explain(tampered(calm, tmp_path / "t", cut), [(slowest.request, slowest.index)])
    (part,) = found.explanations
    assert part.outcome == "unfinished"
    assert slowest.arrived_ns < part.end_ns <= middle_ns
    check_sums(part)
    (whole,) = explain(calm, [(slowest.request, slowest.index)]).explanations
    known = {(each.start_ns, each.phase, each.cause) for each in whole.intervals}
    assert {(each.start_ns, each.phase, each.cause) for each in part.intervals[:-1]} <= known
    assert any("no clean end" in warning for warning in found.warnings)


def test_a_gap_is_reported_as_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    clock = [1000.0]
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: int(clock[0] * 1e9))
    outcomes: Counter[str] = Counter()
    num_unseen = 0
    for seed in range(8):
        with LogWriter(real_system(), tmp_path, f"{seed}") as writer:
            simulation = Simulation(seed, writer=writer, check_every=0)

            def fill_disk(event: Event) -> None:
                """For sixty events."""
                if event.s in (150, 210):
                    disk.num_full = (1 << 30) * (event.s == 150)
                    clock[0] += 100

            simulation.engine_core.bus.attach(fill_disk)
            simulation.run()
        log = read(writer.run_folder)
        with LogReader(writer.run_folder) as reader:
            assert [*reader][-1].tag == "end"
            (gap,) = reader.gaps
        found = explain(log.path, log.requests)
        gap_ends_ns = next(event.ts for event in log.events if event.s > gap.last)
        last_ns = max(event.ts for event in log.events if event.s < gap.first)
        for explanation in found.explanations:
            check_sums(explanation)
            outcomes[explanation.outcome] += 1
            unseen = [each for each in explanation.intervals if each.phase == "unseen"]
            num_unseen += len(unseen)
            assert [each.end_ns for each in unseen] in ([], [gap_ends_ns])
            if explanation.outcome == "unknown":
                assert explanation.end_ns == last_ns
            for before, each in pairwise(explanation.intervals):
                # What it waited for is known as far as the log goes; how its steps went on is not.
                if each.phase == "unseen" and not before.steps:
                    assert each.start_ns == last_ns
            if unseen and log.events[0].s < explanation.request < gap.first:
                assert explanation.notes == ["events of its life were not recorded"]
            elif unseen:
                assert explanation.notes == ["its arrival is not in the log"]
    assert outcomes["unknown"] >= 3
    assert num_unseen >= OFTEN


def test_who_is_not_there(calm: Path) -> None:
    log = read(calm)
    request = log.requests[0][0]
    n = next(event.n for event in log.events if isinstance(event, Arrived))
    with pytest.raises(UsageError, match=f"has no sequence {request}.7: request {request} has fewer samples"):
        explain(calm, [(request, 7)])
    launch = next(event.s for event in log.events if isinstance(event, Launched))
    with pytest.raises(UsageError, match=f"event {launch} of .* is not a request but `launch`"):
        explain(calm, [(launch, None)])
    with pytest.raises(UsageError, match="has no request 1000000, its events are 0 to "):
        explain(calm, [(1_000_000, None)])
    assert [each.index for each in explain(calm, [(request, None)]).explanations] == list(range(n))


def test_an_explained_rejection_has_its_numbers(tmp_path: Path) -> None:
    machine = small_machine({"type": "fcfs"}, max_queue_len=1, max_num_seqs=1)
    log = read(record(tmp_path, machine, chaos=CALM))
    rejected = [each for each in explain(log.path, log.requests).explanations if each.outcome.startswith("rejected")]
    assert rejected
    for each in rejected:
        check_sums(each)
        assert each.outcome == "rejected: queue_full"
        assert "max_queue_len is 1" in each.notes[0]
        assert {interval.phase for interval in each.intervals} <= {"edge"}
        assert explain(log.path, [(each.request, each.n - 1)]).explanations == [each]


def test_a_log_that_ends_within_a_group(tmp_path: Path) -> None:
    log = read(record(tmp_path, small_machine({"type": "fcfs"}), seed=3))
    first = next(event for event in log.events if isinstance(event, Arrived) and event.group_size > 1)
    path = tampered(log.path, tmp_path / "t", lambda objects: objects.__delitem__(slice(first.s + 1, None)))
    with pytest.raises(UsageError, match=f"ends with the arrival of request {first.s}, and nothing is decided yet"):
        explain(path, [(first.s, None)])
