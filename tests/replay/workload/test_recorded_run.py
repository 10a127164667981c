"""A recorded run taken apart: outputs, delays, sessions, and what is not known."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.events import Arrived, Cancelled, Emitted, Event, Finished, Rejected
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.workload import NEVER, Cancel, Patience, SequenceOutput, TextEnd
from eventlm.system.system import real_system
from tests.made_requests import changed
from tests.replay.made_workloads import MILLISECOND
from tests.replay.traces import CALM, small_machine
from tests.replay.what_if_runs import events_of, made_run, requests_of, run_of
from tests.simulation import Simulation


def test_fates_are_those_that_were_served(tmp_path: Path) -> None:
    workload = requests_of([0, 5, 10, 15], output=20)
    outputs = [
        SequenceOutput(num_tokens=20),
        SequenceOutput(worker_end=7, worker_reason="stop_token"),
        SequenceOutput(text_end=TextEnd(position=4, reason="stop", delay_ns=MILLISECOND)),
        SequenceOutput(answer_delay_ns=2 * MILLISECOND),
    ]
    requests = [
        structs.replace(request, outputs=[sequence_output], arrival=changed(request.arrival, has_text_ends=index > 1))
        for index, (request, sequence_output) in enumerate(zip(workload.requests, outputs, strict=True))
    ]
    run = read_run(run_of(tmp_path, structs.replace(workload, requests=requests)))
    found = [request.outputs[0] for request in run.workload.requests]
    assert [sequence_output.reason for sequence_output in found] == ["length", "stop_token", "stop", "length"]
    assert [sequence_output.num_tokens for sequence_output in found] == [20, 7, 4, 20]
    assert [sequence_output.worker_end for sequence_output in found] == [NEVER, 7, NEVER, NEVER]
    text_end = found[2].text_end
    assert text_end is not None
    assert (text_end.position, text_end.reason, text_end.delay_ns) == (4, "stop", MILLISECOND)
    assert found[3].answer_delay_ns == 2 * MILLISECOND
    assert not any(request.has_unknown_length for request in run.workload.requests)
    assert [request.arrival_ns for request in run.workload.requests] == [1, *(ms * MILLISECOND for ms in (5, 10, 15))]


def test_a_cancel_is_placed_by_progress(tmp_path: Path) -> None:
    workload = requests_of([0], output=20)
    cancel = Cancel(index=0, position=6, delay_ns=MILLISECOND)
    cancelled = [structs.replace(workload.requests[0], cancel=cancel)]
    run = read_run(run_of(tmp_path, structs.replace(workload, requests=cancelled)))
    found = run.workload.requests[0].cancel
    assert found is not None
    assert (found.index, found.position, found.delay_ns, found.reason) == (0, 6, MILLISECOND, "client")
    assert run.workload.requests[0].outputs[0].seen_tokens == 6
    assert run.workload.requests[0].patience is None


def test_a_cancel_before_the_first_token_is_patience(tmp_path: Path) -> None:
    workload = requests_of([5], output=20)
    patience = Patience(limit_ns=MILLISECOND)
    path = run_of(
        tmp_path, structs.replace(workload, requests=[structs.replace(workload.requests[0], patience=patience)])
    )
    run = read_run(path)
    found = run.workload.requests[0]
    assert found.patience is not None
    assert (found.patience.limit_ns, found.waited_ns, found.cancel) == (MILLISECOND, MILLISECOND, None)
    assert found.outputs[0].seen_tokens == 0
    assert null_test(run, path).difference == ""


def test_a_cancel_in_the_tick_of_a_token_comes_in_that_tick_again(tmp_path: Path) -> None:
    workload = requests_of([0], output=20)
    times = [event.ts for event in events_of(run_of(tmp_path / "whole", workload)) if isinstance(event, Emitted)]
    cancel = Cancel(index=0, position=6, delay_ns=times[6] - times[5], s=1_000_000)
    path = run_of(
        tmp_path / "cut", structs.replace(workload, requests=[structs.replace(workload.requests[0], cancel=cancel)])
    )
    [cancelled] = [event for event in events_of(path) if isinstance(event, Cancelled)]
    assert cancelled.ts == times[6]
    run = read_run(path)
    found = run.workload.requests[0].cancel
    assert found is not None
    assert (found.position, found.delay_ns) == (6, times[6] - times[5])
    assert null_test(run, path).difference == ""


def requests_with(events: list[Event], kind: type[Event]) -> set[int]:
    return {event.request for event in events if isinstance(event, kind)}  # type: ignore[attr-defined]


def test_what_was_rejected_has_an_unknown_length(tmp_path: Path) -> None:
    path = made_run(tmp_path, 5, num_requests=60, max_queue_len=3, max_num_seqs=2)
    rejected = requests_with(events_of(path), Rejected)
    run = read_run(path)
    assert rejected
    for request in run.workload.requests:
        if request.s in rejected:
            assert [sequence_output.seen_tokens for sequence_output in request.outputs] == [0] * request.arrival.n
            assert not request.is_unfinished


def test_a_log_that_ends_early_leaves_requests_unfinished(tmp_path: Path) -> None:
    path = run_of(tmp_path, requests_of([0, 0, 0, 500], output=30))
    lines = (path / "trace.jsonl").read_bytes().splitlines(keepends=True)
    cut = next(index for index, line in enumerate(lines) if b'"t":"finish"' in line)
    (tmp_path / "early.jsonl").write_bytes(b"".join(lines[:cut]))
    run = read_run(tmp_path / "early.jsonl")
    assert run.num_unfinished == 3
    assert len(run.workload.requests) == 3
    for request in run.workload.requests:
        assert request.is_unfinished
        assert 0 < (request.outputs[0].seen_tokens or 0) <= 30


def test_subscribers_see_every_event(tmp_path: Path) -> None:
    path = made_run(tmp_path, 2)
    seen: list[Event] = []
    run = read_run(path, subscribers=[seen.append])
    assert seen == events_of(path)
    assert run.num_events == len(seen)
    assert len(run.workload.requests) == sum(isinstance(event, Arrived) for event in seen)


def test_requests_under_way_where_a_log_begins_are_counted(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=4096) as writer:
        Simulation(4, num_requests=40, writer=writer, check_every=0).run()
    segment = sorted(writer.run_folder.glob("trace-*.jsonl"))[1]
    (tmp_path / "trace.jsonl").write_bytes(segment.read_bytes())
    events = events_of(tmp_path)
    arrived = {event.s for event in events if isinstance(event, Arrived)}
    run = read_run(segment)
    assert run.start is not None
    before = {request.arrival.s for request in run.start.requests}
    assert run.num_skipped == len(before) > 0
    assert requests_with(events, Finished) <= before | arrived
    assert {request.s for request in run.workload.requests} <= arrived
    assert read_run(writer.run_folder).start is None


def test_a_group_that_a_full_disk_has_cut_in_two_did_not_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventlm.bus.log_writer.RETRY_NS", 0)
    write, num_cuts = os.write, 0

    def fill_up(fd: int, data: bytes) -> int:
        """There is no room for the second member of a group, once."""
        nonlocal num_cuts
        index = data.find(b'"group_index":1')
        if index < 0 or num_cuts == 2:
            return write(fd, data)
        num_cuts += 1
        if num_cuts == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:index])

    with LogWriter(real_system(), tmp_path, "run") as writer:
        simulation = Simulation(1, machine=small_machine({"type": "fcfs"}), chaos=CALM, writer=writer)
        monkeypatch.setattr(os, "write", fill_up)
        simulation.run()
    with LogReader(writer.run_folder) as log:
        arrivals = [event for event in (line.event() for line in log) if isinstance(event, Arrived)]
        assert len(log.gaps) == 1
    alone = [each for each in arrivals if each.group_size > 1 and each.s + 1 not in {other.s for other in arrivals}]
    alone = [each for each in alone if each.group_index == 0]
    assert len(alone) == 1
    workload = read_run(writer.run_folder).workload
    assert [request.s for request in workload.requests] == [each.s for each in arrivals if each is not alone[0]]
    for group in workload.groups():
        assert [workload.requests[index].arrival.group_index for index in group] == list(range(len(group)))
