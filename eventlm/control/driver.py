"""The closed loop without its clock: pending facts are stamped, written, applied, and their effects delivered.

One `drain` takes all facts that are pending as one tick. A launch leaves for its worker as soon as it is decided, for
it can be recomputed; what a client may see waits until its fact is written. The asynchronous engine and the tests'
virtual time drive this same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Raw, structs

from eventlm.bus.bus import Bus
from eventlm.bus.log_writer import LogWriter
from eventlm.control.live_requests import LiveRequests, Output, Sink
from eventlm.control.request import EngineRequest
from eventlm.core.core import Core
from eventlm.core.validate import validate, validate_liveness
from eventlm.events import (
    Admitted,
    Checkpoint,
    Closing,
    Decision,
    Desynced,
    Emitted,
    End,
    Event,
    Fact,
    Finished,
    Gap,
    Header,
    Launched,
    Marker,
    Rejected,
    Snapshot,
    StepOps,
    TextEnded,
    WorkerLost,
)
from eventlm.events.codec import encode_body
from eventlm.events.decisions import RejectReason
from eventlm.worker.protocol import StepPayload, StepResult

#: Makes facts just before they are stamped, so that they can depend on what earlier facts of the drain did. Gets the
#: position that the first of them will have, and makes at least one.
MakeFacts = Callable[[int], Sequence[Fact]]
#: Told once whether a group was admitted: None, or why not; and the seqs of its requests.
OnAdmission = Callable[[RejectReason | None, list[int]], None]
#: Ships a launch: the event, its line's body, and what travels beside it.
Ship = Callable[[Launched, bytes, StepPayload], None]


class Driver:
    """Owns the core, the log and the live requests of one engine."""

    def __init__(
        self,
        header: Header,
        core: Core,
        live: LiveRequests,
        *,
        bus: Bus,
        ship: Ship,
        writer: LogWriter | None = None,
        checkpoint_events: int = 1000,
        validate_every: int = 0,
    ) -> None:
        self.core = core
        self.live = live
        self.bus = bus
        self._ship = ship
        self._writer = writer
        self._checkpoint_events = checkpoint_events
        self._validate_every = validate_every
        self._num_drains = 0
        self._last_checkpoint = 0
        self._inbox: list[MakeFacts] = []
        self._unpublished: list[Event] = []
        #: Bodies of the launches among them, which their workers have had already.
        self._shipped: dict[int, bytes] = {}
        self._outbox: list[Output] = []
        self._admissions: list[tuple[OnAdmission, RejectReason | None, list[int]]] = []
        #: Markers of the steps completed in this drain; they may only stand behind it.
        self._ops: list[StepOps] = []
        self._groups: dict[int, tuple[OnAdmission, list[int]]] = {}
        self._header = header
        self._mark(header)
        self._deliver()

    def put(self, make: MakeFacts) -> None:
        """Queue facts for the next drain."""
        self._inbox.append(make)

    def put_fact(self, fact: Fact) -> None:
        """Queue one fact that depends on nothing."""
        self._inbox.append(lambda _: [fact])

    def submit(self, group: list[tuple[EngineRequest, Sink]], on_admission: OnAdmission) -> None:
        """Queue the arrivals of one group, which is not empty."""

        def make(seq: int) -> list[Fact]:
            facts: list[Fact] = [
                self.live.arrive(seq + i, request, sink, group_size=len(group), group_index=i)
                for i, (request, sink) in enumerate(group)
            ]
            self._groups[seq] = (on_admission, [seq + i for i in range(len(group))])
            return facts

        self.put(make)

    def complete(self, replica: int, result: StepResult, *, start_ns: int, end_ns: int) -> None:
        """Queue the completion of a step."""

        def make(seq: int) -> list[Fact]:
            if result.ops:
                self._ops.append(StepOps(c=seq, replica=replica, epoch=result.epoch, step=result.step, ops=result.ops))
            return [self.live.complete(replica, result, start_ns=start_ns, end_ns=end_ns)]

        self.put(make)

    def end_text(self, request: int, index: int, position: int, reason: str) -> None:
        """Queue the edge's word on a text; nothing if the request has left."""
        if request in self.live:
            self.put_fact(TextEnded(c=request, request=request, index=index, position=position, reason=reason))

    def drain(self, now_ns: int) -> None:
        """Apply all that is pending as one tick at `now_ns`, or 1 ns after the last one if the clock stood still."""
        if not self._inbox:
            return
        ts = max(now_ns, self.core.state.now_ns + 1)
        inbox, self._inbox = self._inbox, []
        try:
            for position, make in enumerate(inbox, start=1):
                facts = make(self.core.next_seq)
                for place, fact in enumerate(facts, start=1):
                    marked = position == len(inbox) and place == len(facts)
                    self._apply(structs.replace(fact, s=self.core.next_seq, ts=ts, p=int(marked)))
            self._check()
            self._mark_ops()
            if self.core.next_seq - self._last_checkpoint >= self._checkpoint_events:
                self.checkpoint()
        finally:
            self._deliver()
        if self._writer is not None and self._writer.segment_due:
            self._start_segment(self._writer)

    def checkpoint(self) -> None:
        """Write a digest of the state into the log."""
        self._mark(Checkpoint(digests=self.core.digests()))
        self._last_checkpoint = self.core.next_seq

    def end(self, reason: str) -> None:
        """Close the log cleanly."""
        try:
            if self._writer is not None and self._writer.problem:
                self._start_segment(self._writer)
            self.checkpoint()
            self._mark(End(reason=reason))
            self._deliver()
        finally:
            self.close()

    def close(self) -> None:
        """End all subscriptions and close the log, as it is."""
        self.bus.close()
        if self._writer is not None:
            self._writer.close()

    def _apply(self, fact: Fact) -> None:
        self._unpublished.append(fact)
        if isinstance(fact, WorkerLost | Desynced) and fact.epoch == self.core.state.replicas[fact.replica].epoch:
            self.live.forget_worker(fact.replica)
        for decision in self.core.apply(fact):
            self._unpublished.append(decision)
            self._effect(decision)

    def _mark_ops(self) -> None:
        ops, self._ops = self._ops, []
        for marker in ops:
            self._mark(marker)

    def _start_segment(self, writer: LogWriter) -> None:
        """Go on in a new segment, which can be read without those before it. Clients have had their outputs."""
        gap = None
        if writer.problem:
            gap = Gap(first=writer.next_s, last=self.core.next_seq - 1, reason=writer.problem)
        writer.start_segment(self.core.next_seq, self._first_lines(writer.previous_h, gap))
        events, self._unpublished = self._unpublished, []
        self.bus.publish(events)

    def _first_lines(self, previous_h: str, gap: Gap | None) -> Iterator[bytes]:
        """What a segment begins with; each is stamped when it is asked for, and lost if it cannot be written."""
        yield encode_body(self._mark(structs.replace(self._header, previous_h=previous_h)))
        if gap is not None:
            yield encode_body(self._mark(gap))
        yield encode_body(self._mark(Snapshot(state=Raw(self.core.snapshot()))))

    def _mark(self, marker: Marker) -> Marker:
        """Its cause is the event before it, unless it names one."""
        seq = self.core.next_seq
        stamped = structs.replace(marker, s=seq, ts=self.core.state.now_ns, c=marker.c or max(seq - 1, 0))
        self._unpublished.append(stamped)
        self.core.apply(stamped)
        return stamped

    def _effect(self, decision: Decision) -> None:
        if isinstance(decision, Launched):
            body = self._shipped[decision.s] = encode_body(decision)
            self._ship(decision, body, self.live.launch(decision))
        elif isinstance(decision, Emitted):
            self._outbox += self.live.emit(decision)
        elif isinstance(decision, Closing):
            self._outbox.append(self.live.start_closing(decision))
        elif isinstance(decision, Finished):
            self._outbox.append(self.live.finish(decision))
        elif isinstance(decision, Admitted):
            self._resolve(decision.request, None)
        elif isinstance(decision, Rejected):
            self.live.reject(decision.request)
            self._resolve(decision.request, decision.reason)

    def _resolve(self, seq: int, reason: RejectReason | None) -> None:
        """The first member of a group stands for all of it."""
        group = self._groups.pop(seq, None)
        if group is not None:
            self._admissions.append((group[0], reason, group[1]))

    def _check(self) -> None:
        self._num_drains += 1
        if self._validate_every and self._num_drains % self._validate_every == 0:
            validate(self.core.state)
            validate_liveness(self.core.state)

    def _deliver(self) -> None:
        """Write, then let everybody see: subscribers, and clients."""
        events, self._unpublished = self._unpublished, []
        if self._writer is not None:
            self._write(self._writer, events)
        self._shipped.clear()
        self.bus.publish(events)
        admissions, self._admissions = self._admissions, []
        for on_admission, reason, seqs in admissions:
            on_admission(reason, seqs)
        outbox, self._outbox = self._outbox, []
        for sink, output in outbox:
            sink(output)

    def _write(self, writer: LogWriter, events: list[Event]) -> None:
        """All of the drain in one go and one system call: what a step pays for being recorded."""
        for event in events:
            writer.append(self._shipped.get(event.s) or encode_body(event))
        writer.flush()
