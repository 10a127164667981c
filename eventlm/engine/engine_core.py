"""What an engine does with the events of its loop: launches are shipped, events written, and clients served.

A launch leaves for its worker as soon as it is decided, because it can be recomputed. What a client may see waits until
its fact is written. Live engines and the tests' virtual time use this same class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from msgspec import Raw, structs

from eventlm.bus.bus import Bus
from eventlm.bus.log_writer import LogWriteError
from eventlm.bus.recorder import Effect, Recorder
from eventlm.bus.token_log import OutputTokens, encode_line
from eventlm.core.core import Core
from eventlm.core.state.validate import validate_liveness, validate_part
from eventlm.engine.backend import AnswerDelta, AnswerEnd, AttemptId, BackendError
from eventlm.engine.backends.answers import Answer
from eventlm.engine.core_loop import CoreLoop, RunClock, Shell
from eventlm.engine.live_requests import LiveRequest, LiveRequests, Output, Sink
from eventlm.engine.replicas.grammar_builds import GrammarBuilds
from eventlm.engine.request import EngineUnavailableError, Request, RequestOutput, Submission
from eventlm.engine.request_spool import RequestSpool
from eventlm.engine.spool.records import (
    AnswerEndRecord,
    ArrivalRecord,
    DeltasRecord,
    DropRecord,
    FailureRecord,
    GrammarErrorRecord,
    StepRecord,
)
from eventlm.errors import EventLMError
from eventlm.events import (
    Admitted,
    Cancelled,
    Closing,
    Decision,
    Emitted,
    End,
    Event,
    Fact,
    Finished,
    Forwarded,
    Gap,
    GrammarReady,
    Header,
    Launched,
    Marker,
    Rejected,
    Relayed,
    Snapshot,
    StepOps,
    TextEnded,
    Withdrawn,
)
from eventlm.events.codec import encode_body
from eventlm.events.decisions import RejectReason
from eventlm.grammars import GrammarError
from eventlm.metrics.rows import EndedRows
from eventlm.types import NANOSECONDS_PER_SECOND, SequenceId
from eventlm.worker.protocol import StepPayload, StepResult

#: Called once for each group, with None if it was admitted, or why not; and with the seqs of its requests.
OnAdmission = Callable[[RejectReason | None, list[int]], None]
#: Called with the seqs of requests whose callback raised, and what it raised. They must be cancelled.
OnBroken = Callable[[list[int], Exception], None]
#: Called with the seq of a request that has ended because a sequence of it killed its workers.
OnCondemned = Callable[[int], None]


#: How long the spool keeps what is over.
FORGET_NS = 60 * NANOSECONDS_PER_SECOND


class Forwarder(Protocol):
    """Sends requests to other servers."""

    def forward(self, forwarded: Forwarded, answer: Answer) -> None:
        """Begin an attempt, which goes on from what the answer has."""
        ...

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """End an attempt that does not count any more."""
        ...

    def finish(self, identity: SequenceId) -> None:
        """End what is under way for a sequence that is over."""
        ...


#: Ships a launch: the event, the body of its line, and what the worker needs beside it.
Ship = Callable[[Launched, bytes, StepPayload], None]


class EngineCore:
    """Owns the core, the log and the live requests of one engine.

    rows: where the metrics store, which must subscribe to the bus, puts its rows of ended sequences. A sink or
    OnAdmission that raises affects its own requests only: they get no more outputs, and `on_broken` is called.
    """

    def __init__(
        self,
        header: Header,
        core: Core,
        live: LiveRequests,
        *,
        clock: RunClock,
        bus: Bus,
        ship: Ship,
        on_broken: OnBroken,
        recorder: Recorder | None = None,
        rows: EndedRows | None = None,
        checkpoint_events: int = 1000,
        validate_every: int = 0,
        grammars: GrammarBuilds | None = None,
        on_condemned: OnCondemned | None = None,
        forwarder: Forwarder | None = None,
        spool: RequestSpool | None = None,
    ) -> None:
        self._forwarder = forwarder
        self._spool = spool
        self._clock = clock
        #: A new segment will let the spool forget what is over, or should do so now.
        self._will_forget = self._must_forget = False
        self._is_turning = False
        #: What other servers have sent since the last drain.
        self._deltas: dict[AttemptId, list[AnswerDelta]] = {}
        self.core = core
        self.live = live
        self.bus = bus
        self._ship = ship
        self._on_broken = on_broken
        self._on_condemned = on_condemned
        self._grammars = grammars
        self._recorder = recorder
        self._rows = rows
        if recorder is not None:
            recorder.on_idle = self._turn
        #: Between two drains: a segment can start from the state.
        self._is_settled = False
        self._validate_every = validate_every
        self._num_drains = 0
        self._unpublished: list[Event] = []
        #: Bodies of the launches among them, which have gone to their workers already.
        self._shipped: dict[int, bytes] = {}
        #: Their lines for the token log, if one is written.
        self._token_lines: list[bytes] = []
        self._records_tokens = recorder is not None and header.level == "tokens"
        self._outbox: list[Output] = []
        #: Requests by seq that are over and whose last output has not left.
        self._leaving: dict[int, LiveRequest] = {}
        self._admissions: list[tuple[OnAdmission, RejectReason | None, list[int]]] = []
        #: Markers of the steps completed in this drain; they must come after it in the log.
        self._ops: list[StepOps] = []
        self._groups: dict[int, tuple[OnAdmission, list[int]]] = {}
        self._header = header
        shell = Shell(self._see_fact, self._worker_changed, self._carry_out, self._see_marker, self._drained)
        self._loop = CoreLoop(core, clock, shell, checkpoint_events=checkpoint_events)
        if not core.next_seq:
            self._loop.mark(header)
            self._deliver()

    def go_on(self) -> None:
        """The core is that of a run whose engine has died or handed over: go on in a segment of its own. Raises
        LogWriteError.
        """
        recorder = self._recorder
        assert recorder is not None
        self._start_segment(recorder)
        self._settle(recorder)

    def _settle(self, recorder: Recorder) -> None:
        """The log has begun. Raises LogWriteError."""
        self._is_settled = True
        recorder.settle()
        if recorder.problem:
            raise LogWriteError(f"cannot go on with the trace {recorder.writer.path}: {recorder.problem}")
        if self._grammars is not None:
            for request in self.live.requests:
                if grammar := self.live.grammar(request):
                    self._grammars.want(request, grammar)
                    self._grammars.watch(request)

    def follow(self, previous_h: str) -> None:
        """The core has the requests of another run: begin this one with its state, after the line of that run which has
        this hash. Raises LogWriteError.
        """
        events: list[Event] = []
        bodies = [*self._first_lines(previous_h, None, events)]
        assert self._recorder is not None
        self._recorder.write(bodies, lambda: self.bus.publish(events))
        self._settle(self._recorder)

    def hand_over(self) -> None:
        """Close the log between two drains, so that the next engine has nothing to replay."""
        if self._recorder is not None and self._spool is not None:
            self._recorder.settle()
            self._start_segment(self._recorder)
        self.close()

    def put_fact(self, fact: Fact) -> None:
        """Queue one fact that depends on nothing."""
        self._loop.put_fact(fact)

    def submit(
        self, group: list[tuple[Request, Sink]], on_admission: OnAdmission, submission: Submission | None = None
    ) -> None:
        """Queue the arrivals of one group, which is not empty."""

        def make(seq: int, ts: int) -> list[Fact]:
            facts: list[Fact] = [
                self.live.arrive(seq + i, request, sink, group_size=len(group), group_index=i)
                for i, (request, sink) in enumerate(group)
            ]
            if self._records_tokens:
                self._token_lines += [encode_line(self.live.prompt_tokens(seq + i)) for i in range(len(group))]
            if self._spool is not None:
                self._spool.add(ArrivalRecord(seq, [request for request, _ in group], submission))
            self._groups[seq] = (on_admission, [seq + i for i in range(len(group))])
            return facts

        self._loop.put(make)

    def complete(
        self, replica: int, result: StepResult, *, start_ns: int, end_ns: int, stages: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Queue the completion of a step; nothing if its worker is lost.

        Raises ResultMismatchError if it does not answer what was launched; then the worker must count as lost.
        """
        worker = self.core.state.replicas[replica].worker
        if worker is None or result.epoch < worker:
            return
        self.live.answer(replica, result)

        def make(seq: int, ts: int) -> list[Fact]:
            if result.ops:
                self._ops.append(StepOps(c=seq, replica=replica, epoch=result.epoch, step=result.step, ops=result.ops))
            if self._records_tokens:
                self._token_lines.append(encode_line(OutputTokens(s=seq, tokens=result.tokens)))
            if self._spool is not None:
                self._spool.add(StepRecord(seq, result.tokens, result.extras))
            return [self.live.complete(replica, result, start_ns=start_ns, end_ns=end_ns, stages=stages)]

        self._loop.put(make)

    def answer_went_on(self, name: AttemptId, delta: AnswerDelta) -> None:
        """Queue what another server's answer goes on with. All of one drain is one fact."""
        if not self._deltas:
            self._loop.put(self._make_streamed)
        self._deltas.setdefault(name, []).append(delta)

    def _make_streamed(self, seq: int, ts: int) -> list[Fact]:
        deltas, self._deltas = self._deltas, {}
        if self._spool is not None:
            self._spool.add(DeltasRecord(seq, list(deltas.items())))
        return [self.live.answers.stream(deltas)]

    def answer_ended(self, name: AttemptId, ended: AnswerEnd) -> None:
        """Queue the end of another server's answer."""

        def make(seq: int, ts: int) -> list[Fact]:
            if self._spool is not None:
                self._spool.add(AnswerEndRecord(seq, ended))
            return [self.live.answers.end(name, ended)]

        self._loop.put(make)

    def attempt_failed(self, name: AttemptId, error: BackendError, *, can_continue: bool) -> None:
        """Queue that an attempt has failed. can_continue: whether another server can go on from what was shown."""

        def make(seq: int, ts: int) -> list[Fact]:
            if self._spool is not None:
                self._spool.add(FailureRecord(seq, error.failure))
            return [self.live.answers.fail(name, error, can_continue=can_continue)]

        self._loop.put(make)

    def end_text(self, request: int, index: int, position: int, reason: str) -> None:
        """Queue what the edge has found in a text; nothing if the request has left."""
        if request in self.live:
            self.put_fact(TextEnded(c=request, request=request, index=index, position=position, reason=reason))

    def grammar_ready(self, request: int, error: GrammarError | None) -> None:
        """Queue that a request's grammar is ready or failed; nothing if it has left. The log does not get the error."""
        if request not in self.live:
            return
        if error is not None:
            self.live.fail_grammar(request, str(error))

        def make(seq: int, ts: int) -> list[Fact]:
            if self._spool is not None and error is not None:
                self._spool.add(GrammarErrorRecord(seq, str(error)))
            return [GrammarReady(c=request, request=request, error="cannot be built" if error is not None else "")]

        self._loop.put(make)

    def drain(self, now_ns: int) -> None:
        """Apply all that is pending as one tick at `now_ns`, or 1 ns after the last one if the clock stood still."""
        if not self._loop.has_pending:
            return
        self._is_settled = False
        try:
            self._loop.drain(now_ns)
        finally:
            self._deliver()
        self._is_settled = True
        self._turn()

    def fail(self, error: EventLMError) -> None:
        """The engine cannot go on: every request that has not had its last output ends with this error."""
        leaving, self._leaving = self._leaving, {}
        for request in leaving.values():
            request.fail(error)
        self.live.fail(error)

    def end(self, reason: str) -> None:
        """Close the log cleanly."""
        recorder = self._recorder
        try:
            if recorder is not None:
                recorder.settle()
                if recorder.problem:
                    self._start_segment(recorder)
            self._is_settled = False
            self._loop.checkpoint()
            self._loop.mark(End(reason=reason))
            self._deliver()
        finally:
            self.close()
        if self._spool is not None:
            # Nobody goes on with a run that has ended.
            self._spool.remove()

    def close(self) -> None:
        """Close the log, as it is, and end all subscriptions."""
        self._is_settled = False
        self._loop.disarm()
        try:
            if self._recorder is not None:
                self._recorder.close()
        finally:
            self.bus.close()

    def _see_fact(self, fact: Fact) -> None:
        self._unpublished.append(fact)
        if isinstance(fact, Cancelled):
            self.live.cancel(fact.request, fact.reason)

    def _see_marker(self, marker: Marker) -> None:
        self._unpublished.append(marker)

    def _worker_changed(self, index: int, decisions: Sequence[Decision]) -> None:
        self.live.set_worker(index, self.core.state.replicas[index].worker)
        # The loss of a worker ends only those that are found to be its reason.
        for decision in decisions:
            if isinstance(decision, Finished) and self._on_condemned is not None:
                self._on_condemned(decision.request)

    def _drained(self) -> None:
        self._num_drains += 1
        if self._validate_every and self._num_drains % self._validate_every == 0:
            # A pass over all blocks would stop all streams for a tenth of a second.
            validate_part(self.core.state, self._num_drains // self._validate_every)
            validate_liveness(self.core.state)
        ops, self._ops = self._ops, []
        for marker in ops:
            self._loop.mark(marker)

    def _turn(self) -> None:
        """Start a segment if one is due."""
        recorder = self._recorder
        if recorder is None or not self._is_settled or self._is_turning:
            return
        if recorder.segment_due or (self._must_forget and not recorder.problem):
            self._is_turning = True
            try:
                if self._spool is not None:
                    # It begins with the outputs of all drains, so none may wait.
                    recorder.settle()
                self._start_segment(recorder)
            finally:
                self._is_turning = False

    def note_over(self) -> None:
        """Something is over that the spool has: it is forgotten after a while, with a new segment."""
        if self._spool is not None and not self._will_forget:
            self._will_forget = True
            self._clock.call_at(self._clock.now_ns() + FORGET_NS, self._forget)

    def _forget(self) -> None:
        self._must_forget = True
        self._turn()

    def drop_reply(self, reply_id: str, then: Effect) -> None:
        """The owner of a reply has had it deleted: `then` is called once the spool says so."""
        if self._spool is None or self._recorder is None:
            then()
            return
        self._spool.add(DropRecord(reply_id))
        self._recorder.write([], then, records=self._spool.take())
        self.note_over()

    def _start_segment(self, recorder: Recorder) -> None:
        """Go on in a new segment, which can be read without those before it. Clients need not wait for it."""
        gap = None
        if recorder.problem and recorder.writer.next_s < self.core.next_seq:
            gap = Gap(first=recorder.writer.next_s, last=self.core.next_seq - 1, reason=recorder.problem)
        events: list[Event] = []
        lines = self._first_lines(recorder.previous_h, gap, events)
        if self._spool is not None:
            self._spool.prepare(self.core.next_seq)
            self._will_forget = self._must_forget = False
        recorder.start_segment(self.core.next_seq, lines, lambda: self.bus.publish(events))

    def _first_lines(self, previous_h: str, gap: Gap | None, events: list[Event]) -> Iterator[bytes]:
        """The markers that begin a segment. Each is stamped when it is taken, and lost if it cannot be written."""
        events.append(self._loop.stamp(structs.replace(self._header, previous_h=previous_h)))
        yield encode_body(events[-1])
        if gap is not None:
            events.append(self._loop.stamp(gap))
            yield encode_body(events[-1])
        events.append(self._loop.stamp(Snapshot(state=Raw(self.core.snapshot()))))
        yield encode_body(events[-1])

    def _carry_out(self, decision: Decision) -> None:
        self._unpublished.append(decision)
        if isinstance(decision, Launched):
            body = self._shipped[decision.s] = encode_body(decision)
            self._ship(decision, body, self.live.launch(decision))
        elif isinstance(decision, Emitted):
            self._outbox += self.live.emit(decision)
        elif isinstance(decision, Relayed):
            self._outbox += self.live.relay(decision)
        elif isinstance(decision, Forwarded | Withdrawn):
            self._forward(decision)
        elif isinstance(decision, Closing):
            self._outbox.append(self.live.start_closing(decision))
        elif isinstance(decision, Finished):
            output = self.live.finish(decision)
            self._outbox.append(output)
            if not output.request.num_unfinished:
                self._leaving[decision.request] = output.request
                self.note_over()
            if self._forwarder is not None:
                self._forwarder.finish(SequenceId(decision.request, decision.index))
            if self._grammars is not None and decision.request not in self.live:
                self._grammars.forget(decision.request)
        elif isinstance(decision, Admitted):
            self._resolve(decision.request, None)
            if self._grammars is not None and (grammar := self.live.awaited_grammar(decision.request)):
                self._grammars.want(decision.request, grammar)
        elif isinstance(decision, Rejected):
            self.live.reject(decision.request)
            self._resolve(decision.request, decision.reason)

    def _forward(self, decision: Forwarded | Withdrawn) -> None:
        assert self._forwarder is not None
        if isinstance(decision, Forwarded):
            self._forwarder.forward(decision, self.live.answers.begin(decision))
        else:
            self._forwarder.withdraw(decision)

    def _resolve(self, seq: int, reason: RejectReason | None) -> None:
        """The first member of a group stands for all of it."""
        group = self._groups.pop(seq, None)
        if group is not None:
            self._admissions.append((group[0], reason, group[1]))

    def _deliver(self) -> None:
        """Write, then publish to subscribers and clients."""
        events, self._unpublished = self._unpublished, []
        admissions, self._admissions = self._admissions, []
        outbox, self._outbox = self._outbox, []

        def leave() -> None:
            self.bus.publish(events)
            for on_admission, reason, seqs in admissions:
                try:
                    on_admission(reason, seqs)
                except Exception as error:
                    self._on_broken(seqs, error)
            for output in outbox:
                self._deliver_output(output)

        if self._recorder is None:
            leave()
        else:
            self._write(self._recorder, events, leave)
        self._shipped.clear()

    def _deliver_output(self, output: Output) -> None:
        request, content, ended = output
        if ended is not None:
            # Now that its events are published, the log's own measurements are there.
            content = self._with_row(content, ended)
            if not request.num_unfinished:
                self._leaving.pop(request.seq, None)
        try:
            request.sink(content)
        except Exception as error:
            request.fail(EngineUnavailableError("the engine could not deliver an output; see the server's log"))
            self._on_broken([request.seq], error)

    def _with_row(self, output: RequestOutput, ended: SequenceId) -> RequestOutput:
        return output if self._rows is None else structs.replace(output, row=self._rows.find(ended))

    def _write(self, recorder: Recorder, events: list[Event], leave: Effect) -> None:
        """Write the whole drain at once. This is what a step pays for being recorded."""
        tokens, self._token_lines = self._token_lines, []
        records = self._spool.take() if self._spool is not None else ()
        bodies = [self._shipped.get(event.s) or encode_body(event) for event in events]
        recorder.write(bodies, leave, tokens=tokens, records=records)
