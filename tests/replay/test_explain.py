"""Explanations: every nanosecond of every request of random workloads has one cause, and it is the log's."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.control.metrics import MetricsStore
from eventlm.control.metrics_rows import RequestRow, StepRow
from eventlm.errors import UsageError
from eventlm.events import (
    Arrived,
    Desynced,
    Event,
    GrammarReady,
    Launched,
    Paused,
    Preempted,
    Resumed,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.events.codec import decode_body
from eventlm.replay.divergence import as_object
from eventlm.replay.explain import DivergenceError, Explained, explain
from eventlm.replay.explain_result import Explanation, parts
from eventlm.replay.explain_story import tell
from tests.bus.slow_disk import SlowDisk
from tests.replay.golden import BROKEN, FOLDER, GOLDEN
from tests.replay.traces import CALM, record, small_machine, tampered
from tests.replay.workload_runs import SEGMENT_BYTES
from tests.simulation import Simulation

NUM_WORKLOADS = 100
#: What comes up in so many workloads at least so often.
OFTEN = 5
PHASES = ("queue", "prefill", "decode", "preempted", "recompute", "text_end")
CAUSES = ("blocks", "sequence_limit", "token_budget", "head_of_line", "steps_in_flight", "trial", "worker", "paused")
CAUSES += ("draining", "grammar", "text_end", "step", "other_step", "lost_step", "cut_step")


class Log(NamedTuple):
    """A trace as the tests read it, without a core."""

    path: Path
    events: list[Event]
    rows: dict[tuple[int, int], RequestRow]

    @property
    def requests(self) -> list[tuple[int, None]]:
        """All, as `explain` is asked for them."""
        return [(event.s, None) for event in self.events if isinstance(event, Arrived)]


class _Rows:
    """A sink that keeps what has ended."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], RequestRow] = {}

    def request_ended(self, row: RequestRow) -> None:
        self.rows[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        """Not wanted."""


def read(path: Path) -> Log:
    sink = _Rows()
    store = MetricsStore(sink=sink)
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    for event in events:
        store.apply(event)
    return Log(path, events, sink.rows)


def check_sums(explanation: Explanation) -> None:
    """Gapless, without overlap, and so with the right sum; so are the parts."""
    cursor_ns = explanation.start_ns
    for interval in explanation.intervals:
        assert interval.start_ns == cursor_ns < interval.end_ns
        cursor_ns = interval.end_ns
    assert cursor_ns == explanation.end_ns
    assert sum(part.duration_ns for part in parts(explanation)) == explanation.total_ns


def check_against_metrics(explanation: Explanation, row: RequestRow) -> None:
    """What the metrics store measured of the same log, by itself."""
    assert explanation.total_ns == row.request_e2e_time
    first_ns = explanation.first_token_ns
    assert (None if first_ns is None else first_ns - explanation.start_ns) == row.prefill_e2e_time
    assert len(explanation.preemptions) == row.request_num_preemptions
    assert (explanation.outcome, explanation.output_tokens) == (row.reason, row.output_tokens)
    queued = [each for each in explanation.intervals if each.phase == "queue"]
    if row.request_scheduling_delay is not None and not row.request_num_preemptions:
        # Admitted without a chunk it is no longer in the queue, and has not been launched.
        assert sum(each.duration_ns for each in queued) <= row.request_scheduling_delay
    if row.request_prefill_time is not None and not row.request_num_preemptions:
        prompt = [each for each in explanation.intervals if each.phase == "prefill"]
        early_ns = (row.request_scheduling_delay or 0) - sum(each.duration_ns for each in queued)
        shown_later_ns = row.request_prefill_time + early_ns - sum(each.duration_ns for each in prompt)
        # With a step in flight behind it the last chunk's result comes back while that one is computed.
        [*_, last] = [each for each in explanation.steps if each.num_tokens]
        assert shown_later_ns in (0, last.completed_ns - last.end_ns) or not last.num_produced


def moments(log: Log) -> dict[int, None]:
    """Every time that the log names."""
    found: dict[int, None] = {}
    for event in log.events:
        found[event.ts] = None
        if isinstance(event, StepCompleted):
            found |= dict.fromkeys([event.start_ns, event.end_ns])
        elif isinstance(event, Arrived):
            found |= dict.fromkeys([event.received_ns, event.ready_ns])
    return found


class Spans(NamedTuple):
    """When the engine was paused, when no worker was up, and until when a request had no grammar."""

    paused: list[tuple[int, int]]
    no_worker: list[tuple[int, int]]
    grammar: dict[int, int]


def spans(log: Log) -> Spans:
    """By the facts alone."""
    paused: list[tuple[int, int]] = []
    no_worker: list[tuple[int, int]] = [(0, 1 << 60)]
    grammar: dict[int, int] = {}
    up: dict[int, int] = {}
    newest: dict[int, int] = {}
    for event in log.events:
        if isinstance(event, Paused) and not (paused and paused[-1][1] > event.ts):
            paused.append((event.ts, 1 << 60))
        elif isinstance(event, Resumed) and paused:
            paused[-1] = (paused[-1][0], min(paused[-1][1], event.ts))
        elif isinstance(event, GrammarReady):
            grammar.setdefault(event.request, event.ts)
        elif isinstance(event, WorkerUp) and event.epoch > newest.get(event.replica, 0):
            if not up:
                no_worker[-1] = (no_worker[-1][0], event.ts)
            newest[event.replica] = up[event.replica] = event.epoch
        elif isinstance(event, WorkerLost | Desynced) and event.epoch >= newest.get(event.replica, 0):
            newest[event.replica] = event.epoch
            if up.pop(event.replica, None) is not None and not up:
                no_worker.append((event.ts, 1 << 60))
    return Spans(paused, no_worker, grammar)


def check_causes(explanation: Explanation, log: Log, known: Spans, times: dict[int, None]) -> None:
    """Causes that the facts alone tell."""
    for interval in explanation.intervals:
        start_ns, end_ns = interval.start_ns, interval.end_ns
        assert end_ns in times
        if interval.cause == "paused":
            assert any(low <= start_ns and end_ns <= high for low, high in known.paused)
        elif interval.cause == "worker":
            assert any(low <= start_ns and end_ns <= high for low, high in known.no_worker)
        elif interval.cause == "grammar":
            assert end_ns <= known.grammar.get(explanation.request, end_ns)
        elif interval.cause == "sequence_limit":
            assert len(interval.held_by) == interval.limit
        elif interval.cause == "blocks":
            assert interval.num_lacking > 0
            assert interval.held_by
        elif interval.cause in ("token_budget", "step", "steps_in_flight"):
            assert interval.steps
        elif interval.cause in ("head_of_line", "trial"):
            assert interval.other is not None


def check_steps(explanation: Explanation, log: Log) -> None:
    """A sequence that was never preempted was computed while the completions of its steps say, and not otherwise."""
    own = (explanation.request, explanation.index)
    launches = {event.s: event for event in log.events if isinstance(event, Launched)}
    windows = []
    for event in log.events:
        launched = launches.get(event.c) if isinstance(event, StepCompleted) else None
        if launched is None or not isinstance(event, StepCompleted) or event.ts > explanation.end_ns:
            continue
        if own in [row[:2] for row in [*launched.decodes, *launched.chunks]]:
            # A drain has a time of its own, which may lie a nanosecond behind the worker's start.
            start_ns = max(event.start_ns, launched.ts)
            windows.append((launched.replica, launched.step, event.end_ns - start_ns))
    computed = [
        (each.replica, each.steps[0], each.duration_ns) for each in explanation.intervals if each.cause == "step"
    ]
    if any(each.cause == "text_end" for each in explanation.intervals):
        windows = windows[: len(computed)]
    assert computed == windows


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Random workloads of everything that may happen; one in five in many files."""
    folder = tmp_path_factory.mktemp("explained")
    paths = []
    for seed in range(NUM_WORKLOADS):
        with LogWriter(folder, f"{seed}", segment_bytes=0 if seed % 5 else SEGMENT_BYTES) as writer:
            Simulation(seed, num_requests=10, writer=writer, check_every=0).run()
        paths.append(writer.run_folder)
    return paths


@pytest.fixture(scope="module")
def explained(logs: list[Path]) -> list[tuple[Log, Explained]]:
    return [(log, explain(log.path, log.requests)) for log in map(read, logs)]


def test_every_nanosecond_of_every_request_has_one_cause(explained: list[tuple[Log, Explained]]) -> None:
    causes: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for log, found in explained:
        assert found.warnings == []
        times, known = moments(log), spans(log)
        ended = {(each.request, each.index) for each in found.explanations if not each.outcome.startswith("rejected")}
        assert ended == log.rows.keys()
        for explanation in found.explanations:
            check_sums(explanation)
            check_causes(explanation, log, known, times)
            assert all(paragraph.endswith(".") for paragraph in tell(explanation))
            row = log.rows.get((explanation.request, explanation.index))
            if row is not None:
                check_against_metrics(explanation, row)
                if not explanation.preemptions:
                    check_steps(explanation, log)
            causes.update({interval.cause for interval in explanation.intervals})
            causes.update({interval.phase for interval in explanation.intervals})
            outcomes[explanation.outcome] += 1
    for name in (*PHASES, *CAUSES):
        assert causes[name] >= OFTEN, name
    for name in ("length", "eos", "stop", "complete", "cancelled", "deadline", "rejected: queue_full"):
        assert outcomes[name] >= OFTEN, name


def test_preemptions_are_those_of_the_log(explained: list[tuple[Log, Explained]]) -> None:
    num_ordered = num_unordered = 0
    for log, found in explained:
        told = {(each.request, each.index): each.preemptions for each in found.explanations}
        recorded: dict[tuple[int, int], list[Preempted]] = {}
        for event in log.events:
            if isinstance(event, Preempted):
                recorded.setdefault((event.request, event.index), []).append(event)
        for identity, events in recorded.items():
            assert [(p.at_ns, p.reason, p.by) for p in told[identity]] == [(e.ts, e.reason, e.by) for e in events]
        for preemption in (p for each in told.values() for p in each):
            if preemption.order is None:
                num_unordered += preemption.by is not None
                continue
            # Whoever took its place was more urgent.
            assert preemption.order.other == preemption.by
            assert preemption.order.other_urgency <= preemption.order.own_urgency
            num_ordered += 1
    # It is not known of one that was admitted and evicted in one drain.
    assert num_ordered >= max(OFTEN, 50 * num_unordered)


def alone_in(segment: Path, log: Log, whole: dict[tuple[int, int], Explanation]) -> list[Explanation]:
    """What a segment says of all that lived in it; of the one that ended last before it, it says that it has ended."""
    with LogReader(segment) as reader:
        events = [line.event() for line in reader]
    first, last = events[0], events[-1]
    ends: dict[int, int] = {}
    for (request, _), full in whole.items():
        ends[request] = max(ends.get(request, 0), full.end_ns)
    ended = [request for request, end_ns in ends.items() if end_ns <= first.ts]
    if ended:
        with pytest.raises(UsageError, match="ended before"):
            explain(segment, [(ended[-1], None)])
    later = next((request for request, _ in log.requests if request > last.s), None)
    if later is not None:
        with pytest.raises(UsageError, match="has no request"):
            explain(segment, [(later, None)])
    return explain(
        segment, [(request, None) for request in ends if request not in ended and request <= last.s]
    ).explanations


def test_a_later_segment_tells_the_same_of_what_it_has(logs: list[Path]) -> None:
    """Alone it does not know what came before it; how sequences ended it tells as the whole run does."""
    num_compared = 0
    for path in logs[::5]:
        log = read(path)
        whole = {(each.request, each.index): each for each in explain(path, log.requests).explanations}
        segment = sorted(path.glob("trace-*.jsonl"))[len(list(path.glob("trace-*.jsonl"))) // 2]
        with LogReader(segment) as reader:
            first_ns = reader.header.ts
        for part in alone_in(segment, log, whole):
            check_sums(part)
            full = whole[part.request, part.index]
            assert part.start_ns == full.start_ns
            if part.arrived_ns < first_ns:
                assert part.notes == ["its arrival is not in the log"]
                assert part.intervals[0].cause == "not_recorded"
            if part.outcome == full.outcome:
                assert part.end_ns == full.end_ns
                # What began before the segment may have another cause there.
                rest = [each for each in part.intervals if each.start_ns > first_ns][1:]
                known = {(each.start_ns, each.end_ns, each.phase, each.cause) for each in full.intervals}
                assert {(each.start_ns, each.end_ns, each.phase, each.cause) for each in rest} <= known
                num_compared += len(rest)
    assert num_compared > 20 * OFTEN


def test_a_request_is_explained_from_the_file_that_it_arrived_in(explained: list[tuple[Log, Explained]]) -> None:
    """Nothing but the numbers of lines that were read tells that the files before it were left out."""
    for log, found in explained[::5]:
        asked = log.requests[-1:] + log.requests[len(log.requests) // 2 :][:1]
        for request, _ in asked:
            alone = explain(log.path, [(request, None)])
            assert alone.explanations == [each for each in found.explanations if each.request == request]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces(name: str) -> None:
    log = read(FOLDER / f"{name}.jsonl")
    found = explain(log.path, log.requests)
    assert len(found.explanations) >= len(log.rows) > 5
    for explanation in found.explanations:
        check_sums(explanation)
        check_causes(explanation, log, spans(log), moments(log))


def test_a_trace_that_diverges_is_not_explained_beyond_that() -> None:
    path = FOLDER / f"{BROKEN}.jsonl"
    requests = read(path).requests
    with pytest.raises(DivergenceError, match=r"is not what this version decides: at event .* tells more") as raised:
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
        for place, item in enumerate(objects):
            if item["t"] == "done":
                item["start_ns"] += 50_000
                item["end_ns"] -= 70_000
            elif item["t"] == "arrive":
                item |= {"received_ns": item["ts"] - 3000, "ready_ns": item["ts"] - 1000}
                # Fields have their order in a line.
                objects[place] = as_object(decode_body(msgspec.json.encode(item)[:-1]))

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
        del objects[next(place for place, item in enumerate(objects) if item["ts"] > middle_ns) :]

    found = explain(tampered(calm, tmp_path / "t", cut), [(slowest.request, slowest.index)])
    (part,) = found.explanations
    assert part.outcome == "unfinished"
    assert slowest.arrived_ns < part.end_ns <= middle_ns
    check_sums(part)
    (whole,) = explain(calm, [(slowest.request, slowest.index)]).explanations
    known = {(each.start_ns, each.phase, each.cause) for each in whole.intervals}
    assert {(each.start_ns, each.phase, each.cause) for each in part.intervals[:-1]} <= known
    assert any("no clean end" in warning for warning in found.warnings)


def test_a_gap_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    clock = [1000.0]
    monkeypatch.setattr("eventlm.bus.log_writer.time.monotonic", lambda: clock[0])
    outcomes: Counter[str] = Counter()
    num_unseen = 0
    for seed in range(8):
        with LogWriter(tmp_path, f"{seed}") as writer:
            simulation = Simulation(seed, writer=writer, check_every=0)

            def fill_disk(event: Event) -> None:
                """For sixty events."""
                if event.s in (150, 210):
                    disk.num_full = (1 << 30) * (event.s == 150)
                    clock[0] += 100

            simulation.driver.bus.attach(fill_disk)
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
    with pytest.raises(UsageError, match=f"event {launch} of .* is no request but `launch`"):
        explain(calm, [(launch, None)])
    with pytest.raises(UsageError, match="has no request 1000000, its events are 0 to "):
        explain(calm, [(1_000_000, None)])
    assert [each.index for each in explain(calm, [(request, None)]).explanations] == list(range(n))


def test_a_rejected_request_says_by_which_numbers(tmp_path: Path) -> None:
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
