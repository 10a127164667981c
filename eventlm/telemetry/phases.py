"""PhaseFold: a fold over the log to the phases of each sequence, its prompt chunks, and the steps.

    edge -> queue -> prefill -> decode -> (text_end)
                       ^  |        |
             recompute    v        v
                    ^---- preempted

A sequence waits until its first chunk is launched, computes its prompt until the last chunk has completed, and then
decodes. Steps in flight at a preemption change nothing: it is preempted from then on. These are the phases of `eventlm
explain`, from the log alone, with one difference: a sequence that was admitted before its first chunk was launched is
still in the queue, because the log does not show its admission. Of sequences that are forwarded to other servers see
`eventlm.telemetry.attempts`.

The log may begin in the middle of a run, with a later segment or as a branch. Then the snapshot there has the sequences
that are live, and they begin with it, in the phase that they are in. Events may also be missing: sequences that were
live before them end as `unknown`, and only those that arrived since go on from the next snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from eventlm.core.state.in_flight import launches_in_flight
from eventlm.core.state.sequence import State
from eventlm.core.state.snapshot import SequenceRow, StateSnapshot
from eventlm.events import (
    Admitted,
    Arrived,
    Closing,
    Desynced,
    Event,
    Finished,
    Header,
    Launched,
    Preempted,
    Recovered,
    Rejected,
    Snapshot,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.telemetry.attempts import ForwardedPhases, TracedAttempt
from eventlm.types import TimeWindow

#: The phase of a sequence.
PhaseName = Literal[
    "edge",  # before the engine stamped its arrival
    "queue",  # waiting for its first admission
    "prefill",  # resident, until its last prompt chunk has completed
    "decode",
    "preempted",  # waiting to be admitted again
    "retry",  # waiting to be sent to another server again
    "recompute",  # resident again, until its tokens are computed again
    "text_end",  # ended by the worker, its text is still searched for an earlier end
]

#: Outcomes of sequences that have no finish reason: the log ends first, or lacks the events of their end.
UNFINISHED, UNKNOWN = "unfinished", "unknown"

#: States with blocks on a replica.
_RESIDENT = (State.PREFILL, State.DECODE)


class TracedSequence(Struct, kw_only=True, eq=False):
    """A sequence between its admission and its end. Times in ns of the run.

    start_ns: its request reached the socket, or the log began where it was live. phase_ns: its phase began.
    computed_ns: its last chunk ended.
    replica: where it was launched last, -1 before.
    """

    arrival: Arrived
    index: int
    start_ns: int
    phase: PhaseName
    phase_ns: int
    is_phase_shown: bool = False
    computed_ns: int = 0
    replica: int = -1
    num_preemptions: int = 0

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.arrival.s}.{self.index}" if self.arrival.n > 1 else str(self.arrival.s)

    @property
    def identity(self) -> tuple[int, int]:
        """(request, index)"""
        return self.arrival.s, self.index


class TracedChunk(NamedTuple):
    """A prompt chunk in a completed step: `num_tokens` after `position`.

    It begins and ends with its step, but not before the phase or the chunk before it, nor after the completion.
    """

    sequence: TracedSequence
    position: int
    num_tokens: int
    start_ns: int
    end_ns: int


class TracedStep(NamedTuple):
    """A completed step, the chunks of the followed sequences in it, and whether it overlaps the window."""

    launched: Launched
    fact: StepCompleted
    chunks: list[TracedChunk]
    in_window: bool


class PhaseSink(Protocol):
    """Gets what happens to the followed sequences, and every step, in the order of the log.

    Phases of a sequence follow each other without gaps. Empty ones are left out, unless a chunk lies in them.
    """

    def sequence_began(self, sequence: TracedSequence) -> None:
        """It was admitted to the queue; it begins at `start_ns`."""
        ...

    def phase_began(self, sequence: TracedSequence) -> None:
        """Its `phase` began at `phase_ns`, which may be earlier than the latest event."""
        ...

    def phase_ended(self, sequence: TracedSequence, ns: int) -> None:
        """Its `phase` ends."""
        ...

    def preempted(self, sequence: TracedSequence, event: Preempted, by: TracedSequence | None) -> None:
        """It lost its blocks. by: for whom, if that sequence is followed."""
        ...

    def sequence_ended(self, sequence: TracedSequence, ns: int, outcome: str, finished: Finished | None) -> None:
        """It ends. outcome: the reason of `finished`, else UNFINISHED or UNKNOWN."""
        ...

    def request_rejected(self, arrival: Arrived, event: Rejected) -> None:
        """A request was turned away."""
        ...

    def step_ended(self, step: TracedStep) -> None:
        """A step has completed. The phases that its chunks lie in have begun."""
        ...

    def attempt_ended(self, attempt: TracedAttempt) -> None:
        """An attempt at another server is over, whether or not its sequence is followed."""
        ...


class _Replica:
    """Its launches in flight, by their `s`."""

    def __init__(self) -> None:
        self.epoch = 0
        self.launches: dict[int, Launched] = {}


class PhaseFold:
    """`apply` takes events in the order of the log, the header first; `finish` is called after the last.

    window: follow only requests that arrive in it, and report only steps that overlap it, or compute one of those.
    """

    def __init__(self, sink: PhaseSink, *, window: TimeWindow | None = None) -> None:
        self._sink = sink
        self._window = window
        self._next_s = -1
        self._now_ns = 0
        #: Whether the next snapshot has sequences that the events have not shown.
        self._lacks_events = False
        #: Requests that ended as unknown where events are missing.
        self._unknown: set[int] = set()
        self._replicas: list[_Replica] = []
        self._arriving: dict[int, Arrived] = {}
        #: Requests in the order of their arrival, the oldest live one first; others may have ended.
        self._live: deque[Arrived] = deque()
        self._sequences: dict[tuple[int, int], TracedSequence] = {}
        self._forwards = ForwardedPhases(self._move, self._end_attempt)
        #: By number of the replicaset, whether it is made of other servers.
        self._are_servers: list[bool] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Header: self._begin,
            Snapshot: self._take_up,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Rejected: self._rejected,
            Launched: self._launched,
            StepCompleted: self._step_completed,
            Preempted: self._preempted,
            Closing: self._closing,
            Finished: self._finished,
            WorkerUp: self._worker_up,
            WorkerLost: self._worker_lost,
            Desynced: self._worker_lost,
            Recovered: self._recovered,
            **self._forwards.handlers,
        }

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        if event.s != self._next_s >= 0:
            self._skip_gap()
        self._next_s, self._now_ns = event.s + 1, event.ts
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def finish(self) -> None:
        """After the last event: what is live is unfinished."""
        self._forwards.end(self._now_ns)
        self._end_all(UNFINISHED)

    @property
    def oldest_live(self) -> int | None:
        """The first followed request that has not ended; None if there is none. One ends after its last span."""
        return self._live[0].s if self._live else None

    def _begin(self, header: Header) -> None:
        if not self._replicas:
            self._replicas = [_Replica() for _ in range(header.num_replicas)]
            self._are_servers = [bool(each.core.forwards) for each in header.sets]
            self._lacks_events = header.s > 0

    def _skip_gap(self) -> None:
        """Events are missing. Sequences that were live before them may have ended since."""
        self._lacks_events = True
        self._unknown |= {request for request, _ in self._sequences}
        self._end_all(UNKNOWN)
        for replica in self._replicas:
            replica.launches.clear()
        self._forwards.forget()

    def _end_all(self, outcome: str) -> None:
        for sequence in self._sequences.values():
            self._end(sequence, outcome, None)
        self._sequences.clear()
        self._arriving.clear()
        self._live.clear()

    def _forget_ended(self) -> None:
        while self._live and not self._is_live(self._live[0]):
            self._live.popleft()

    def _is_live(self, arrival: Arrived) -> bool:
        return arrival.s in self._arriving or any((arrival.s, index) in self._sequences for index in range(arrival.n))

    def _take_up(self, event: Snapshot) -> None:
        if not self._lacks_events:
            return
        self._lacks_events = False
        taken = msgspec.json.decode(event.state, type=StateSnapshot)
        for replica, replica_taken in zip(self._replicas, taken.replicas, strict=True):
            replica.epoch = replica_taken.epoch
        for launched in launches_in_flight(taken):
            self._replicas[launched.replica].launches[launched.s] = launched
        self._forwards.take_up(taken)
        ending_prompts = {
            (request, index)
            for replica_taken in taken.replicas
            for step in replica_taken.steps
            for request, index, _, _, is_final in step.chunks
            if is_final
        }
        for request in taken.requests:
            arrival = request.arrival
            is_followed = self._window is None or self._window.has(arrival.ts)
            for row in request.sequences:
                identity = (arrival.s, row.index)
                if is_followed and arrival.s not in self._unknown and identity not in self._sequences:
                    self._take_up_sequence(arrival, row, taken.now_ns, is_ending_prompt=identity in ending_prompts)
        self._unknown &= {request.arrival.s for request in taken.requests}
        arrivals = {request.arrival.s: request.arrival for request in taken.requests}
        arrivals |= {arrival.s: arrival for arrival in self._live}
        self._live = deque(arrivals[s] for s in sorted(arrivals) if self._is_live(arrivals[s]))

    def _take_up_sequence(self, arrival: Arrived, row: SequenceRow, ns: int, *, is_ending_prompt: bool) -> None:
        sequence = TracedSequence(
            arrival=arrival,
            index=row.index,
            start_ns=ns,
            phase=_phase_of(row, is_ending_prompt=is_ending_prompt),
            phase_ns=ns,
            replica=row.replica,
            num_preemptions=max(row.residency - (row.state in _RESIDENT), 0),
        )
        if self._are_servers[arrival.replicaset]:
            sequence.num_preemptions = 0
            if sequence.phase != "queue":
                has_tokens = row.num_tokens > arrival.prompt_tokens
                waits = row.state not in _RESIDENT
                sequence.phase = "retry" if waits else "decode" if has_tokens else "prefill"
        self._sequences[sequence.identity] = sequence
        self._sink.sequence_began(sequence)

    def _arrived(self, event: Arrived) -> None:
        if self._window is None or self._window.has(event.ts):
            self._arriving[event.s] = event
            self._live.append(event)

    def _rejected(self, event: Rejected) -> None:
        if (arrival := self._arriving.get(event.request)) is not None:
            self._sink.request_rejected(arrival, event)
            del self._arriving[event.request]
            self._forget_ended()

    def _admitted(self, event: Admitted) -> None:
        if (arrival := self._arriving.pop(event.request, None)) is None:
            return
        start_ns = min(arrival.scheduling.received_ns or arrival.ts, arrival.ts)
        for index in range(arrival.n):
            sequence = TracedSequence(arrival=arrival, index=index, start_ns=start_ns, phase="edge", phase_ns=start_ns)
            self._sequences[sequence.identity] = sequence
            self._sink.sequence_began(sequence)
            self._change(sequence, "queue", arrival.ts)

    def _change(self, sequence: TracedSequence, phase: PhaseName, ns: int) -> None:
        self._end_phase(sequence, ns)
        sequence.phase, sequence.phase_ns, sequence.is_phase_shown = phase, ns, False

    def _end_phase(self, sequence: TracedSequence, ns: int) -> None:
        if ns > sequence.phase_ns:
            self._show(sequence)
        if sequence.is_phase_shown:
            self._sink.phase_ended(sequence, ns)

    def _show(self, sequence: TracedSequence) -> None:
        if not sequence.is_phase_shown:
            sequence.is_phase_shown = True
            self._sink.phase_began(sequence)

    def _launched(self, event: Launched) -> None:
        replica = self._replicas[event.replica]
        replica.launches[event.s] = event
        replica.epoch = max(replica.epoch, event.epoch)
        for request, index, *_ in event.chunks:
            sequence = self._sequences.get((request, index))
            if sequence is not None and sequence.phase in ("queue", "preempted"):
                sequence.replica = event.replica
                self._change(sequence, "recompute" if sequence.num_preemptions else "prefill", event.ts)

    def _step_completed(self, event: StepCompleted) -> None:
        replica = self._replicas[event.replica]
        launched = replica.launches.pop(event.c, None)
        if launched is None:
            # Its worker was lost.
            return
        chunks = [self._chunk(sequence, row, event) for sequence, row in self._computing(launched)]
        overlaps = self._window is None or self._window.overlaps(event.start_ns, event.end_ns)
        if overlaps or chunks:
            self._sink.step_ended(TracedStep(launched, event, chunks, overlaps))
        for sequence, (_, _, position, num_tokens, samples) in self._computing(launched):
            if samples or (position + num_tokens == sequence.arrival.prompt_tokens and not _generates(sequence)):
                self._change(sequence, "decode", event.ts)

    def _computing(self, launched: Launched) -> Iterable[tuple[TracedSequence, tuple[int, int, int, int, int]]]:
        """The chunks of a launch whose sequences compute their prompts."""
        for row in launched.chunks:
            sequence = self._sequences.get((row[0], row[1]))
            if sequence is not None and sequence.phase in ("prefill", "recompute"):
                yield sequence, row

    def _chunk(
        self, sequence: TracedSequence, row: tuple[int, int, int, int, int], event: StepCompleted
    ) -> TracedChunk:
        self._show(sequence)
        start_ns = min(max(event.start_ns, sequence.phase_ns, sequence.computed_ns), event.ts)
        sequence.computed_ns = min(max(event.end_ns, start_ns), event.ts)
        return TracedChunk(sequence, row[2], row[3], start_ns, sequence.computed_ns)

    def _preempted(self, event: Preempted) -> None:
        sequence = self._sequences.get((event.request, event.index))
        if sequence is None:
            return
        sequence.num_preemptions += 1
        by = None if event.by is None else self._sequences.get(event.by)
        self._sink.preempted(sequence, event, by)
        self._change(sequence, "preempted", event.ts)

    def _closing(self, event: Closing) -> None:
        if (sequence := self._sequences.get((event.request, event.index))) is not None:
            self._change(sequence, "text_end", event.ts)

    def _move(self, identity: tuple[int, int], phase: PhaseName, replica: int, ns: int) -> None:
        """A forwarded sequence is in a phase from now on, at a replica or at none."""
        sequence = self._sequences.get(identity)
        if sequence is None:
            return
        if replica >= 0:
            sequence.replica = replica
        if sequence.phase != phase:
            self._change(sequence, phase, ns)

    def _end_attempt(self, attempt: TracedAttempt) -> None:
        if self._window is None or self._window.overlaps(attempt.sent_ns, attempt.ended_ns):
            self._sink.attempt_ended(attempt)

    def _finished(self, event: Finished) -> None:
        self._forwards.finish(event)
        if (sequence := self._sequences.get((event.request, event.index))) is not None:
            self._end(sequence, event.reason, event)
            del self._sequences[sequence.identity]
            self._forget_ended()

    def _end(self, sequence: TracedSequence, outcome: str, finished: Finished | None) -> None:
        self._end_phase(sequence, self._now_ns)
        self._sink.sequence_ended(sequence, self._now_ns, outcome, finished)

    def _worker_up(self, event: WorkerUp) -> None:
        if event.epoch > self._replicas[event.replica].epoch:
            self._lose(event)

    def _worker_lost(self, event: WorkerLost | Desynced) -> None:
        if event.epoch >= self._replicas[event.replica].epoch:
            self._lose(event)

    def _recovered(self, event: Recovered) -> None:
        for replica in self._replicas:
            replica.launches.clear()
        self._forwards.lose(event.ts)

    def _lose(self, event: WorkerUp | WorkerLost | Desynced) -> None:
        """The steps in flight are gone."""
        replica = self._replicas[event.replica]
        replica.epoch = event.epoch
        replica.launches.clear()


def _phase_of(row: SequenceRow, *, is_ending_prompt: bool) -> PhaseName:
    """The phase of a sequence in a snapshot. is_ending_prompt: its last prompt chunk is in flight."""
    if row.state is State.CLOSING:
        return "text_end"
    if row.state not in _RESIDENT:
        return "preempted" if row.residency else "queue"
    if row.state is State.DECODE and not is_ending_prompt:
        return "decode"
    return "prefill" if row.residency == 1 else "recompute"


def _generates(sequence: TracedSequence) -> bool:
    return sequence.arrival.scheduling.kind == "generate"
