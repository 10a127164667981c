"""What tests of explanations read of a log without a core, and what every explanation of it must keep to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.events import (
    Arrived,
    Desynced,
    Event,
    GrammarReady,
    Launched,
    Paused,
    Recovered,
    Resumed,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.explain.result import IN_STEP, Cause, Explanation, parts

#: What comes up in so many cases at least so often.
OFTEN = 5


class Log(NamedTuple):
    """A trace as the tests read it, without a core."""

    path: Path
    events: list[Event]
    rows: dict[tuple[int, int], RequestRow]
    #: By (replica, step).
    steps: dict[tuple[int, int], StepRow]

    @property
    def requests(self) -> list[tuple[int, None]]:
        """All, as `explain` is asked for them."""
        return [(event.s, None) for event in self.events if isinstance(event, Arrived)]


class _Rows:
    """A sink that keeps all."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], RequestRow] = {}
        self.steps: dict[tuple[int, int], StepRow] = {}

    def request_ended(self, row: RequestRow) -> None:
        self.rows[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        self.steps[row.replica, row.step] = row

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """There are none."""


def read(path: Path) -> Log:
    sink = _Rows()
    store = MetricsStore(sink=sink)
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    for event in events:
        store.apply(event)
    return Log(path, events, sink.rows, sink.steps)


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
            found |= dict.fromkeys([event.start_ns, event.end_ns, *chain.from_iterable(event.stages)])
        elif isinstance(event, Recovered):
            found[event.ts - event.down_ns] = None
        elif isinstance(event, Arrived):
            found |= dict.fromkeys([event.scheduling.received_ns, event.scheduling.ready_ns])
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
        elif isinstance(event, Recovered):
            if up:
                no_worker.append((event.ts, 1 << 60))
            up.clear()
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
        elif interval.cause in ("token_budget", "steps_in_flight", *IN_STEP):
            assert interval.steps
        elif interval.cause in ("head_of_line", "trial"):
            assert interval.other is not None


def _pieces(fact: StepCompleted, row: StepRow) -> Iterator[tuple[Cause, int, int]]:
    """A step in a stage, waiting for one, and on its way to it, by what the metrics store measured."""
    there_ns = fact.start_ns
    for (start_ns, end_ns), wait_ns in zip(row.stages, row.stage_waits_ns, strict=True):
        yield "stage_wait", there_ns, there_ns + wait_ns
        yield "exchange", there_ns + wait_ns, start_ns
        yield "step", start_ns, end_ns
        there_ns = end_ns
    if not row.stages:
        yield "step", fact.start_ns, fact.end_ns


def check_steps(explanation: Explanation, log: Log) -> None:
    """A sequence that was never preempted was computed while the completions of its steps say, and not otherwise."""
    own = (explanation.request, explanation.index)
    launches = {event.s: event for event in log.events if isinstance(event, Launched)}
    windows = []
    last_ns = 0
    for event in log.events:
        launched = launches.get(event.c) if isinstance(event, StepCompleted) else None
        if launched is None or not isinstance(event, StepCompleted) or event.ts > explanation.end_ns:
            continue
        if own in [row[:2] for row in [*launched.decodes, *launched.chunks]]:
            # A drain has a time of its own, which may lie a nanosecond behind the worker's start. In a pipeline the
            # next chunk of its prompt follows before this one is through all stages.
            for cause, start_ns, end_ns in _pieces(event, log.steps[launched.replica, launched.step]):
                duration_ns = end_ns - max(start_ns, launched.ts, last_ns)
                if duration_ns > 0:
                    windows.append((cause, launched.replica, launched.step, duration_ns))
                    last_ns = end_ns
    computed = [
        (each.cause, each.replica, each.steps[0], each.duration_ns)
        for each in explanation.intervals
        if each.cause in IN_STEP
    ]
    if any(each.cause == "text_end" for each in explanation.intervals):
        windows = windows[: len(computed)]
    assert computed == windows
