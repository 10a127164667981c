"""Splits a recorded run into the workload that it served, external facts, and the times of its steps.

Delays count from their cause: a cancel and a text end from the token before, a turn of a conversation from the end of
the turn before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from eventlm.bus.log_reader import LogReader
from eventlm.config import CoreConfig
from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.snapshot import StateSnapshot
from eventlm.errors import UsageError
from eventlm.events import (
    Admitted,
    Arrived,
    Cancelled,
    Closing,
    Emitted,
    Event,
    Fact,
    Finished,
    ForwardEnded,
    ForwardFailed,
    Gap,
    GrammarReady,
    Header,
    Launched,
    Marker,
    Rejected,
    Relayed,
    Snapshot,
    StepCompleted,
    Streamed,
    TextEnded,
    TimerDue,
)
from eventlm.replay.cost.recorded_forwards import ForwardCollector
from eventlm.replay.cost.recorded_steps import RecordedStep, StepCollector, by_set
from eventlm.replay.workload.incidents import INCIDENTS
from eventlm.replay.workload.recorded_policies import PolicySpan, recorded_policies
from eventlm.replay.workload.sessions import find_parents
from eventlm.replay.workload.workload import NEVER, Cancel, Patience, SequenceOutput, TextEnd, Workload, WorkloadRequest
from eventlm.types import OnProgress

#: After these ends, the full length of the output is unknown.
CUT_SHORT = frozenset({"cancelled", "deadline", "front_end_lost", "error"})


class RecordedRun(Struct, frozen=True, kw_only=True):
    """A recorded run. External facts, no-ops, timers and the facts of answers are as in the log, with their times and
    positions.

    forwards: the attempts at other servers; answers: what became of them.
    no_ops: facts without effect; only an exact repetition needs them. fact_times_ns: when each text end and cancel was
    applied, by its position. ends_ns: when each request of the workload ended or was rejected; -1: unknown.
    start: the state of the engine if the log begins in the middle of the run, else None. under_way and first_steps are
    then the requests that were live there, with what they generated afterwards, and the steps in flight there, whose
    launch times are not known.
    num_unfinished: requests whose end is not in the log.
    """

    header: Header
    workload: Workload
    external_facts: list[Fact]
    no_ops: list[Fact]
    markers: list[Marker]
    timers: list[TimerDue]
    steps: list[RecordedStep]
    forwards: ForwardCollector
    answers: list[Fact]
    fact_times_ns: dict[int, int]
    num_events: int
    last_ns: int
    ends_ns: list[int]
    num_rejected: int
    start: StateSnapshot | None
    under_way: list[WorkloadRequest]
    first_steps: list[RecordedStep]
    num_unfinished: int
    warnings: list[str]

    @property
    def num_skipped(self) -> int:
        """Requests that were in progress where the log begins."""
        return len(self.start.requests) if self.start is not None else 0

    @property
    def all_work(self) -> Workload:
        """The workload, and behind it the requests that were under way where the log begins."""
        return structs.replace(self.workload, requests=[*self.workload.requests, *self.under_way])

    @property
    def policies(self) -> list[list[PolicySpan]]:
        """By replicaset, the policies in force, in order."""
        return recorded_policies(self.header, self.start, self.external_facts)

    def steps_of_sets(self) -> list[list[RecordedStep]]:
        """By replicaset, the steps of its replicas."""
        return by_set(self.header, self.steps)


class _Sample(Struct, kw_only=True):
    """A sequence of the run, as far as read."""

    emitted_ns: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    worker_end: int = NEVER
    worker_reason: Any = "eos"
    text_end: TextEnd | None = None
    closed_ns: int = -1
    answer_delay_ns: int | None = None
    answer_s: int = 0
    finish: Finished | None = None


class _Request(Struct, kw_only=True):
    """A request of the run, as far as read."""

    arrival: Arrived
    samples: list[_Sample]
    patience: Patience | None = None
    cancel: Cancel | None = None
    grammar: GrammarReady | None = None
    is_rejected: bool = False
    end_ns: int = -1
    num_unfinished: int = 0


class _Reader:
    """Takes the events of a log in order."""

    def __init__(self) -> None:
        self.requests: dict[int, _Request] = {}
        self.live: dict[int, _Request] = {}
        self.external_facts: list[Fact] = []
        self.no_ops: list[Fact] = []
        self.markers: list[Marker] = []
        self.timers: list[TimerDue] = []
        self.steps = StepCollector()
        self.forwards = ForwardCollector()
        self.answers: list[Fact] = []
        self.fact_times_ns: dict[int, int] = {}
        self.start: StateSnapshot | None = None
        self.under_way: dict[int, _Request] = {}
        self.first_steps = StepCollector()
        self.last_ns = 0
        self._launches: dict[int, Launched] = {}
        self._completing: tuple[Launched, StepCompleted] | None = None
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Rejected: self._rejected,
            Launched: self._launched,
            StepCompleted: self._step_completed,
            Emitted: self._emitted,
            Closing: self._closing,
            Finished: self._finished,
            TextEnded: self._text_ended,
            Cancelled: self._cancelled,
            GrammarReady: self._grammar_ready,
            TimerDue: self.timers.append,
            Streamed: self.answers.append,
            ForwardEnded: self.answers.append,
            ForwardFailed: self.answers.append,
            Relayed: self._relayed,
        }

    def apply(self, event: Event) -> None:
        self.last_ns = event.ts
        self.steps.apply(event)
        self.forwards.apply(event)
        if isinstance(event, INCIDENTS):
            self.external_facts.append(event)
        elif isinstance(event, Marker):
            self.markers.append(event)
            # Directly after the header, or the gap before this segment: the log begins here.
            if isinstance(event, Snapshot) and [type(each) for each in self.markers[:-1]] in ([Header], [Header, Gap]):
                self.first_steps.apply(self.markers[0])
                self.first_steps.apply(event)
                self._begin_midway(msgspec.json.decode(event.state, type=StateSnapshot))
        else:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)

    def _begin_midway(self, start: StateSnapshot) -> None:
        self.start = start
        for request in start.requests:
            arrival = request.arrival
            samples = [
                _Sample(finish=Finished(request=arrival.s, index=i, reason="stop", position=0))
                for i in range(arrival.n)
            ]
            for row in request.sequences:
                samples[row.index] = _Sample(
                    emitted_ns=[start.now_ns] * (row.num_tokens - arrival.prompt_tokens),
                    blocks=row.generated_names,
                    closed_ns=start.now_ns if row.closing_reason is not None else -1,
                )
            taken = _Request(arrival=arrival, samples=samples, num_unfinished=len(request.sequences))
            self.under_way[arrival.s] = self.live[arrival.s] = taken
        for launched in launches_in_flight(start):
            self._launches[launched.s] = launched
            self.first_steps.apply(launched)

    def _arrived(self, event: Arrived) -> None:
        samples = [_Sample() for _ in range(event.n)]
        self.requests[event.s] = _Request(arrival=event, samples=samples, num_unfinished=event.n)

    def _admitted(self, event: Admitted) -> None:
        # The arrival may lie in a gap.
        if event.request in self.requests:
            self.live[event.request] = self.requests[event.request]

    def _rejected(self, event: Rejected) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            request.is_rejected, request.end_ns = True, event.ts

    def _launched(self, event: Launched) -> None:
        self._launches[event.s] = event

    def _step_completed(self, event: StepCompleted) -> None:
        self.first_steps.apply(event)
        launched = self._launches.pop(event.c, None)
        # A completion from a lost worker names no launch and has no effect.
        self._completing = None if launched is None else (launched, event)
        if launched is None:
            self.no_ops.append(event)

    def _emitted(self, event: Emitted) -> None:
        if self._completing is None:
            return
        launched, fact = self._completing
        rows = [*launched.decodes, *launched.chunks]
        reasons, filled, dropped = dict(fact.ends), dict(fact.filled), dict(event.dropped)
        for row, ((seq, index, *_), produced) in enumerate(zip(rows, fact.produced, strict=True)):
            request = self.live.get(seq)
            if request is None or (sample := request.samples[index]).finish is not None:
                continue
            sample.blocks += filled.get(row, [])
            sample.emitted_ns += [event.ts] * (produced - dropped.get(row, 0))
            if row in reasons and row not in dropped:
                sample.worker_end, sample.worker_reason = len(sample.emitted_ns), reasons[row]

    def _relayed(self, event: Relayed) -> None:
        streamed = self.answers[-1] if self.answers else None
        if not isinstance(streamed, Streamed):
            # It lies in a gap.
            return
        dropped = set(event.dropped)
        for row, (seq, index, _, total) in enumerate(streamed.rows):
            request = self.live.get(seq)
            if row not in dropped and request is not None:
                sample = request.samples[index]
                sample.emitted_ns += [event.ts] * (total - len(sample.emitted_ns))

    def _closing(self, event: Closing) -> None:
        request = self.live.get(event.request)
        if request is not None:
            request.samples[event.index].closed_ns = event.ts

    def _finished(self, event: Finished) -> None:
        request = self.live.get(event.request)
        if request is None:
            return
        sample = request.samples[event.index]
        sample.finish = event
        if event.reason not in CUT_SHORT and self.answers and self.answers[-1].s == event.c:
            # Its server ended it, wherever that was.
            sample.worker_end = event.position
        request.num_unfinished -= 1
        if not request.num_unfinished:
            request.end_ns = event.ts
            del self.live[event.request]

    def _text_ended(self, event: TextEnded) -> None:
        self.fact_times_ns[event.s] = event.ts
        request = self.live.get(event.request)
        sample = request.samples[event.index] if request is not None and event.index < len(request.samples) else None
        is_expected = sample is not None and sample.finish is None and (event.reason or sample.closed_ns >= 0)
        if request is None or sample is None or not is_expected or not request.arrival.scheduling.has_text_ends:
            self.no_ops.append(event)
        elif event.reason:
            position = min(max(event.position, 0), len(sample.emitted_ns))
            since_ns = sample.emitted_ns[position - 1] if position else request.arrival.ts
            delay_ns = event.ts - since_ns
            sample.text_end = TextEnd(position=position, reason=event.reason, delay_ns=delay_ns, s=event.s)
        else:
            sample.answer_delay_ns, sample.answer_s = event.ts - sample.closed_ns, event.s

    def _cancelled(self, event: Cancelled) -> None:
        self.fact_times_ns[event.s] = event.ts
        request = self.live.get(event.request)
        if request is None or request.cancel is not None or request.patience is not None:
            self.no_ops.append(event)
            return
        # A token of the same tick is not the cause: the client had not received it.
        positions = [bisect_left(sample.emitted_ns, event.ts) for sample in request.samples]
        latest = [
            sample.emitted_ns[position - 1] if position else -1
            for sample, position in zip(request.samples, positions, strict=True)
        ]
        index = latest.index(max(latest))
        position = positions[index]
        if position:
            delay_ns = event.ts - latest[index]
            request.cancel = Cancel(index=index, position=position, delay_ns=delay_ns, reason=event.reason, s=event.s)
        else:
            request.patience = Patience(limit_ns=event.ts - request.arrival.ts, reason=event.reason, s=event.s)

    def _grammar_ready(self, event: GrammarReady) -> None:
        request = self.live.get(event.request)
        if request is None or request.grammar is not None:
            self.no_ops.append(event)
        else:
            request.grammar = event


def read_run(
    path: Path | str,
    *,
    strict: bool = False,
    subscribers: Sequence[Callable[[Event], None]] = (),
    on_progress: OnProgress | None = None,
) -> RecordedRun:
    """Read a run; `subscribers` get its events too. Raises what LogReader raises, and UsageError if its rows may
    produce several tokens.
    """
    with LogReader(path, strict=strict) as log:
        cores = [each.core for each in log.header.sets]
        if any(core.max_tokens_per_row > 1 for core in cores):
            raise UsageError(f"{path}: rows of several tokens (speculation) cannot be replayed under a change yet")
        reader = _Reader()

        def take(event: Event) -> None:
            reader.apply(event)
            for see in subscribers:
                see(event)

        log.fold(take, on_progress=on_progress)
        found = _whole_groups(list(reader.requests.values()))
        requests = _link(found, reader.last_ns, cores)
        under_way = [_workload_request(request, reader.last_ns, cores) for request in reader.under_way.values()]
        names = [*_names_in(reader.start)] if reader.start is not None else []
        names += [max(request.arrival.blocks) for request in requests if request.arrival.blocks]
        names += [max(output.blocks) for each in (*requests, *under_way) for output in each.outputs if output.blocks]
        return RecordedRun(
            header=log.header,
            workload=Workload(
                source=log.path,
                requests=requests,
                block_size=log.header.core.block_size,
                first_free_name=1 + max(names, default=0),
                recorded={each.name: each.core for each in log.header.sets},
            ),
            external_facts=reader.external_facts,
            no_ops=reader.no_ops,
            markers=reader.markers,
            timers=reader.timers,
            steps=reader.steps.steps,
            forwards=reader.forwards,
            answers=reader.answers,
            fact_times_ns=reader.fact_times_ns,
            num_events=log.num_lines,
            last_ns=reader.last_ns,
            ends_ns=[request.end_ns for request in found],
            num_rejected=sum(request.is_rejected for request in found),
            start=reader.start,
            under_way=under_way,
            first_steps=reader.first_steps.steps,
            num_unfinished=len(reader.live.keys() - reader.under_way.keys()),
            warnings=log.warnings(),
        )


def _whole_groups(found: list[_Request]) -> list[_Request]:
    """Without incomplete groups: a log may end, or a gap begin, in the middle of one."""
    # The members of a group have consecutive positions.
    num_members = Counter(request.arrival.s - request.arrival.group_index for request in found)
    return [
        request
        for request in found
        if num_members[request.arrival.s - request.arrival.group_index] == request.arrival.group_size
    ]


def _link(found: list[_Request], last_ns: int, cores: Sequence[CoreConfig]) -> list[WorkloadRequest]:
    """The requests of the workload, each with its parent."""
    ends = [request.end_ns for request in found]
    generated = [[block for sample in request.samples for block in sample.blocks] for request in found]
    parents = find_parents([request.arrival for request in found], ends, generated)
    return [
        _workload_request(request, last_ns, cores, parent, request.arrival.ts - ends[parent] if parent >= 0 else None)
        for request, parent in zip(found, parents, strict=True)
    ]


def _workload_request(
    request: _Request, last_ns: int, cores: Sequence[CoreConfig], parent: int = -1, think_ns: int | None = None
) -> WorkloadRequest:
    """cores: the limits of each replicaset."""
    arrival = request.arrival
    block_size = cores[arrival.replicaset].block_size
    return WorkloadRequest(
        arrival=arrival,
        arrival_ns=arrival.ts,
        outputs=[_output(request, sample) for sample in request.samples],
        received_before_ns=arrival.ts - arrival.scheduling.received_ns if arrival.scheduling.received_ns else 0,
        ready_before_ns=arrival.ts - arrival.scheduling.ready_ns if arrival.scheduling.ready_ns else 0,
        patience=request.patience,
        cancel=request.cancel,
        parent=parent,
        think_ns=think_ns,
        grammar_delay_ns=request.grammar.ts - arrival.ts if request.grammar is not None else 0,
        grammar_error=request.grammar.error if request.grammar is not None else "",
        grammar_s=request.grammar.s if request.grammar is not None else 0,
        waited_ns=_waited_ns(request, last_ns),
        is_unfinished=not request.is_rejected and request.num_unfinished > 0,
        s=arrival.s,
        block_size=0 if block_size == cores[0].block_size else block_size,
    )


def _names_in(start: StateSnapshot) -> Iterator[int]:
    """Names of blocks that the caches have, and the sequences."""
    for replica in start.replicas:
        yield from replica.pool.tree
    for request in start.requests:
        yield from request.arrival.blocks


def _waited_ns(request: _Request, last_ns: int) -> int:
    """From the arrival to the first token, the end without one, or the end of the log."""
    first = [sample.emitted_ns[0] for sample in request.samples if sample.emitted_ns]
    end_ns = request.end_ns if request.end_ns >= 0 else last_ns
    return min(first, default=end_ns) - request.arrival.ts


def _output(request: _Request, sample: _Sample) -> SequenceOutput:
    num_seen = len(sample.emitted_ns)
    finish = sample.finish
    reason = finish.reason if finish is not None else ""
    has_failed_grammar = request.grammar is not None and bool(request.grammar.error)
    has_known_end = sample.worker_end < NEVER or sample.text_end is not None or has_failed_grammar
    is_cut = finish is None or reason in CUT_SHORT
    return SequenceOutput(
        worker_end=sample.worker_end,
        worker_reason=sample.worker_reason,
        text_end=sample.text_end,
        answer_delay_ns=sample.answer_delay_ns,
        answer_s=sample.answer_s,
        blocks=sample.blocks,
        reason=reason,
        num_tokens=finish.position if finish is not None else num_seen,
        seen_tokens=num_seen
        if is_cut and not has_known_end and request.arrival.scheduling.kind == "generate"
        else None,
    )
