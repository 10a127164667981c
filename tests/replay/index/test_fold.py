"""The tables of a run against explanations, and against the launches themselves."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.core.shards import Layout
from eventlm.events import (
    Arrived,
    Desynced,
    Emitted,
    Event,
    Finished,
    Launched,
    Preempted,
    Rejected,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.replay.explain.explainer import explain
from eventlm.replay.explain.result import Explanation
from eventlm.replay.index.fold import RunFold
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from eventlm.replay.index.tables import MarkKind, NameTable, SequencePhase


def _events(path: Path) -> list[Event]:
    with LogReader(path) as reader:
        return [line.event() for line in reader]


def _phases(index: Index, row: int) -> list[tuple[str, int, int]]:
    found = [each for each in index.phases.rows() if each["row"] == row]
    parts: list[tuple[str, int, int]] = []
    for each in found:
        name, start_ns = SequencePhase(each["phase"]).name.lower(), each["start_ns"]
        end_ns = each["end_ns"] if each["end_ns"] >= 0 else index.facts.last_ns
        # A sequence may be preempted and admitted again at one moment.
        if parts and parts[-1][::2] == (name, start_ns):
            parts[-1] = (name, parts[-1][1], end_ns)
        elif end_ns > start_ns:
            parts.append((name, start_ns, end_ns))
    return parts


def _explained(explanation: Explanation) -> list[tuple[str, int, int]]:
    found = []
    for phase, group in groupby(explanation.intervals, key=lambda each: each.phase):
        intervals = list(group)
        found.append((phase, intervals[0].start_ns, intervals[-1].end_ns))
    return found


def test_phases_are_those_of_explanations(all_runs: list[Path]) -> None:
    num_compared = num_recomputed = 0
    for path in all_runs:
        index = open_index(path)
        requests = [event.s for event in _events(path) if isinstance(event, Arrived)]
        for explanation in explain(path, [(request, None) for request in requests]).explanations:
            row = index.find_row(explanation.request, explanation.index)
            assert row is not None
            if explanation.outcome.startswith("rejected"):
                assert index.name(int(index.requests["reason"][row])) == explanation.outcome
                continue
            assert _phases(index, row) == _explained(explanation), (path, explanation.name)
            known = index.requests.row(row)
            assert known["cached_tokens"] == explanation.cached_tokens or explanation.outcome == "unfinished"
            assert (known["first_token_ns"] if known["first_token_ns"] >= 0 else None) == explanation.first_token_ns
            assert known["preemptions"] == len(explanation.preemptions)
            num_compared += 1
            num_recomputed += any(phase == "recompute" for phase, _, _ in _explained(explanation))
    assert num_compared > 100
    assert num_recomputed > 10


def test_stages_and_loads_are_those_of_the_events(all_runs: list[Path]) -> None:
    events, index = _events(all_runs[-1]), open_index(all_runs[-1])
    loads = [
        (event.replica, event.step, group, num_tokens)
        for event in events
        if isinstance(event, Launched)
        for group, num_tokens in enumerate(event.loads)
    ]
    assert [tuple(row.values()) for row in index.loads.rows()] == loads
    # A step of a worker that was lost meanwhile is not completed, although its result may still come.
    completed = {event.s for event in events if isinstance(event, StepCompleted)} & set(index.steps["done_s"].tolist())
    stages = [
        (event.replica, event.step, stage, *times_ns)
        for event in events
        if isinstance(event, StepCompleted) and event.s in completed
        for stage, times_ns in enumerate(event.stages)
    ]
    assert [tuple(row.values()) for row in index.stages.rows()] == stages
    assert len(stages) == 3 * len(completed) > 300
    assert len(loads) > len(stages)


def test_stretches_say_who_shared_a_step(all_runs: list[Path]) -> None:
    for path in all_runs:
        index = open_index(path)
        requests, numbers = index.requests["request"], index.requests["index"]
        for launched in (event for event in _events(path) if isinstance(event, Launched)):
            found = index.stretches.rows(index.members(launched.replica, launched.step))
            members = {(int(requests[e["row"]]), int(numbers[e["row"]]), e["is_chunk"]) for e in found}
            decodes = {(request, number, 0) for request, number, *_ in launched.decodes}
            chunks = {(request, number, 1) for request, number, *_ in launched.chunks}
            assert members == decodes | chunks, (path, launched)


def test_requests_steps_and_marks_are_those_of_the_log(all_runs: list[Path]) -> None:
    for path in all_runs:
        index, events = open_index(path), _events(path)
        launches = [event for event in events if isinstance(event, Launched)]
        assert index.steps["launch_s"].tolist() == [event.s for event in launches]
        assert index.steps["tokens"].tolist() == [event.num_tokens for event in launches]
        assert int(index.steps["emitted"].sum()) == sum(e.num_tokens for e in events if isinstance(e, Emitted))
        done = index.steps["done_s"] >= 0
        assert done.sum() == sum(isinstance(event, Emitted) for event in events)
        assert (index.steps["end_ns"][done] >= index.steps["start_ns"][done]).all()
        ends = {(event.request, event.index): event for event in events if isinstance(event, Finished)}
        for row in index.requests.rows():
            end = ends.get((row["request"], row["index"]))
            if end is not None:
                assert (row["ended_s"], row["ended_ns"]) == (end.s, end.ts)
                assert index.name(row["reason"]) == end.reason
                # What stands for an embedding of another server is no token.
                is_generating = index.name(row["kind"]) == "generate"
                assert row["output_tokens"] == (end.position if is_generating else 0)
        marked = [row["s"] for row in index.marks.rows() if index.name(row["text"]) in ("memory", "admission", "lost")]
        assert marked == [event.s for event in events if isinstance(event, Preempted)]
        rejected = sum(isinstance(event, Rejected) for event in events)
        assert (
            sum(index.name(reason).startswith("rejected") for reason in index.requests["reason"].tolist()) == rejected
        )


def test_the_late_loss_of_an_older_worker_changes_nothing() -> None:
    fold = RunFold(NameTable())
    launched = Launched(s=3, ts=2, replica=0, epoch=2, step=0, num_tokens=1, predicted_ns=1)
    done = StepCompleted(s=5, ts=4, c=3, replica=0, epoch=2, step=0, start_ns=2, end_ns=3, produced=[])
    events = [
        WorkerUp(s=1, ts=1, replica=0, epoch=1),
        WorkerUp(s=2, ts=2, replica=0, epoch=2),
        launched,
        WorkerLost(s=4, ts=3, replica=0, epoch=1, reason="late"),
        done,
        Emitted(s=6, ts=4, c=5, replica=0, step=0, num_tokens=1),
        WorkerLost(s=7, ts=5, replica=0, epoch=2, reason="killed"),
    ]
    for event in events:
        fold.see(event)
    assert list(fold.steps.columns["done_s"]) == [5]
    kinds = [MarkKind(kind) for kind in fold.marks.columns["kind"]]
    assert kinds == [MarkKind.WORKER_UP, MarkKind.WORKER_UP, MarkKind.WORKER_LOST]


def test_a_lost_worker_of_several_is_named_with_its_place() -> None:
    names = NameTable()
    fold = RunFold(names, [Layout(2, 2)])
    for event in (
        WorkerUp(s=1, ts=1, replica=0, epoch=1),
        WorkerLost(s=2, ts=2, replica=0, epoch=1, reason="died", rank=3, step=7),
        WorkerUp(s=3, ts=3, replica=0, epoch=2),
        Desynced(s=4, ts=4, replica=0, epoch=2, step=1, rank=0),
    ):
        fold.see(event)
    texts = [names.names[text] for text in fold.marks.columns["text"] if text >= 0]
    assert list(fold.marks.columns["rank"]) == [-1, 3, -1, 0]
    assert texts == [
        "rank 3 of 4 (stage 1, tensor rank 1): died",
        "rank 0 of 4 (stage 0, tensor rank 0): another length of a sequence",
    ]
