"""Phases from the log alone: those of `explain`, which knows the core's state."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import Arrived, Event, Finished, Header, Preempted, Rejected, Snapshot
from eventlm.replay.explain.explainer import explain
from eventlm.telemetry.attempts import TracedAttempt
from eventlm.telemetry.phases import UNFINISHED, UNKNOWN, PhaseFold, TracedSequence, TracedStep
from eventlm.types import TimeWindow
from tests.replay.branch_runs import without_first_half
from tests.replay.golden import FOLDER
from tests.replay.traces import Objects, tampered
from tests.replay.workload_runs import record

GOLDEN = sorted(path for path in FOLDER.glob("*.jsonl") if path.name != "broken_block.jsonl")
Identity = tuple[int, int]


class Recorder:
    """A sink that keeps everything, and checks the order of what it gets."""

    def __init__(self) -> None:
        self.phases: dict[Identity, list[tuple[str, int, int]]] = {}
        self.outcomes: dict[Identity, tuple[str, int]] = {}
        self.starts: dict[Identity, int] = {}
        self.arrivals: dict[int, int] = {}
        self.rejected: list[int] = []
        self.preemptions: list[tuple[Identity, Identity | None]] = []
        self.steps: list[TracedStep] = []
        self.attempts: list[TracedAttempt] = []
        self.chunks: dict[Identity, list[tuple[int, int]]] = {}
        self._open: set[Identity] = set()

    def sequence_began(self, sequence: TracedSequence) -> None:
        assert sequence.identity not in self.phases
        self.phases[sequence.identity] = []
        self.starts[sequence.identity] = sequence.start_ns
        self.arrivals[sequence.arrival.s] = sequence.arrival.ts

    def phase_began(self, sequence: TracedSequence) -> None:
        assert sequence.identity not in self._open
        self._open.add(sequence.identity)

    def phase_ended(self, sequence: TracedSequence, ns: int) -> None:
        self._open.remove(sequence.identity)
        self.phases[sequence.identity].append((sequence.phase, sequence.phase_ns, ns))

    def preempted(self, sequence: TracedSequence, event: Preempted, by: TracedSequence | None) -> None:
        self.preemptions.append((sequence.identity, None if by is None else by.identity))

    def sequence_ended(self, sequence: TracedSequence, ns: int, outcome: str, finished: Finished | None) -> None:
        assert sequence.identity not in self._open
        self.outcomes[sequence.identity] = (outcome, ns)

    def request_rejected(self, arrival: Arrived, event: Rejected) -> None:
        self.rejected.append(arrival.s)

    def attempt_ended(self, attempt: TracedAttempt) -> None:
        self.attempts.append(attempt)

    def step_ended(self, step: TracedStep) -> None:
        self.steps.append(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert sequence.phase in ("prefill", "recompute")
            assert sequence.identity in self._open
            assert sequence.phase_ns <= chunk.start_ns <= chunk.end_ns <= step.fact.ts
            found = self.chunks.setdefault(sequence.identity, [])
            assert not found or found[-1][1] <= chunk.start_ns
            found.append((chunk.start_ns, chunk.end_ns))


def folded(path: Path, window: TimeWindow | None = None) -> Recorder:
    recorder = Recorder()
    fold = PhaseFold(recorder, window=window)
    with LogReader(path) as reader:
        reader.fold(fold.apply)
    fold.finish()
    return recorder


def check_against_explanations(path: Path) -> None:
    recorder = folded(path)
    explained = explain(path, [(request, None) for request in dict.fromkeys(request for request, _ in recorder.phases)])
    assert len(explained.explanations) == len(recorder.phases)
    for explanation in explained.explanations:
        identity = (explanation.request, explanation.index)
        expected = [
            (phase, group[0].start_ns, group[-1].end_ns)
            for phase, group in (
                (phase, list(each)) for phase, each in groupby(explanation.intervals, lambda i: i.phase)
            )
        ]
        groups = [list(each) for _, each in groupby(recorder.phases[identity], lambda phase: phase[0])]
        found = [(group[0][0], group[0][1], group[-1][2]) for group in groups]
        # Without those that a chunk has shown, and that took no time.
        assert [phase for phase in found if phase[1] < phase[2]] == expected, explanation.name
        assert recorder.outcomes[identity] == (explanation.outcome, explanation.end_ns)
        assert recorder.starts[identity] == explanation.start_ns


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_they_are_those_of_explain(path: Path) -> None:
    check_against_explanations(path)


@pytest.mark.parametrize("seed", [0, 10])
def test_they_are_those_of_explain_in_random_workloads(seed: int, tmp_path: Path) -> None:
    # The second is in many segments.
    record(tmp_path, seed)
    check_against_explanations(tmp_path / f"seed-{seed}")


def test_preemptions_name_who_they_were_for() -> None:
    recorder = folded(FOLDER / "edf_tight.jsonl")
    by_others = [(victim, by) for victim, by in recorder.preemptions if by is not None]
    assert by_others
    assert all(victim != by for victim, by in by_others)
    assert {victim for victim, _ in recorder.preemptions} == {
        identity for identity, phases in recorder.phases.items() if any(phase == "preempted" for phase, *_ in phases)
    }


def test_a_window_has_the_requests_that_arrived_in_it_and_the_steps_that_overlap_it() -> None:
    path = FOLDER / "fcfs_one_replica.jsonl"
    whole = folded(path)
    arrivals = sorted(set(whole.starts.values()))
    window = TimeWindow(arrivals[1], arrivals[len(arrivals) // 2])
    some = folded(path, window)
    assert 0 < len(some.phases) < len(whole.phases)
    assert all(phases == whole.phases[identity] for identity, phases in some.phases.items())
    for step in whole.steps:
        kept = [each for each in some.steps if each.launched == step.launched]
        overlaps = window.overlaps(step.fact.start_ns, step.fact.end_ns)
        if overlaps:
            assert kept[0].in_window
        assert not kept or kept[0].in_window or kept[0].chunks


def test_what_the_log_does_not_end(tmp_path: Path) -> None:
    def cut(objects: Objects) -> None:
        del objects[len(objects) // 2 :]

    recorder = folded(tampered(FOLDER / "lpm_space_sharing.jsonl", tmp_path / "t", cut))
    ends = {ns for outcome, ns in recorder.outcomes.values() if outcome == UNFINISHED}
    assert len(ends) == 1
    assert recorder.outcomes.keys() == recorder.phases.keys()
    for identity, phases in recorder.phases.items():
        assert (
            sum(end - start for _, start, end in phases) == recorder.outcomes[identity][1] - recorder.starts[identity]
        )


def test_events_that_are_missing_end_what_was_live() -> None:
    recorder = Recorder()
    fold = PhaseFold(recorder)
    with LogReader(FOLDER / "fcfs_one_replica.jsonl") as reader:
        events = [line.event() for line in reader]
    middle = len(events) // 2
    for event in events[: middle - 20] + events[middle:]:
        fold.apply(event)
    fold.finish()
    unknown = [identity for identity, (outcome, _) in recorder.outcomes.items() if outcome == UNKNOWN]
    assert unknown
    assert {recorder.outcomes[identity][1] for identity in unknown} == {events[middle - 21].ts}


def test_a_log_that_begins_in_the_middle_of_a_run_has_the_rest_of_it(tmp_path: Path) -> None:
    num_taken_up: Counter[str] = Counter()
    for seed in (5, 10, 15):
        record(tmp_path, seed)
        run = tmp_path / f"seed-{seed}"
        whole = folded(run)
        without_first_half(run)
        rest = folded(run)
        with LogReader(run) as reader:
            first_ns = reader.header.ts
            start = next(event for line in reader if isinstance(event := line.event(), Snapshot))
        live = {
            (request.arrival.s, row.index)
            for request in msgspec.json.decode(start.state, type=StateSnapshot).requests
            for row in request.sequences
        }
        later = {identity for identity in whole.phases if identity[0] > start.s}
        assert rest.phases.keys() == live | later
        for identity, phases in rest.phases.items():
            expected = [(name, max(begin, first_ns), end) for name, begin, end in whole.phases[identity]]
            assert phases == [phase for phase in expected if phase[2] > first_ns], identity
            assert rest.outcomes[identity] == whole.outcomes[identity]
            num_taken_up[phases[0][0]] += identity in live
        assert [step.fact for step in rest.steps] == [step.fact for step in whole.steps if step.fact.s > start.s]
        assert {identity: chunks for identity, chunks in rest.chunks.items() if identity in later} == {
            identity: chunks for identity, chunks in whole.chunks.items() if identity in later
        }
        assert folded(run, TimeWindow(first_ns + 1, None)).phases.keys() == {
            identity for identity in rest.phases if whole.arrivals[identity[0]] > first_ns
        }
    assert num_taken_up.keys() >= {"queue", "prefill", "decode"}


def test_what_arrived_where_events_are_missing_goes_on_after_them(tmp_path: Path) -> None:
    num_hidden = num_again = 0
    for seed in (5, 10, 15):
        record(tmp_path, seed)
        whole = folded(tmp_path / f"seed-{seed}")
        segments: list[list[Event]] = []
        with LogReader(tmp_path / f"seed-{seed}") as reader:
            for line in reader:
                if isinstance(event := line.event(), Header):
                    segments.append([])
                segments[-1].append(event)
        # Every second segment is missing.
        recorder = Recorder()
        fold = PhaseFold(recorder)
        seen = [event for segment in segments[::2] for event in segment]
        for event in seen:
            fold.apply(event)
        fold.finish()
        arrived = {event.s for event in seen if isinstance(event, Arrived)}
        ends = {identity: outcome for identity, outcome in recorder.outcomes.items() if identity[0] not in arrived}
        num_hidden += len(ends)
        num_again += sum(outcome == UNKNOWN for outcome, _ in ends.values())
        for identity, outcome in ends.items():
            assert outcome == whole.outcomes[identity] or outcome[0] == UNKNOWN
            # Those who are seen to the end have their last phases.
            if outcome[0] != UNKNOWN:
                first_ns = recorder.starts[identity]
                expected = [(name, max(begin, first_ns), end) for name, begin, end in whole.phases[identity]]
                assert recorder.phases[identity] == [phase for phase in expected if phase[2] > first_ns]
    assert num_hidden > num_again > 0


def test_rejected_requests(tmp_path: Path) -> None:
    def reject(objects: Objects) -> None:
        last = max(index for index, item in enumerate(objects) if item["t"] == "arrive")
        del objects[last + 1 :]
        objects.append({"t": "reject", "s": 0, "ts": objects[-1]["ts"], "request": last, "reason": "queue_full"})

    recorder = folded(tampered(FOLDER / "edf_tight.jsonl", tmp_path / "t", reject))
    assert len(recorder.rejected) == 1
    assert (recorder.rejected[0], 0) not in recorder.phases
