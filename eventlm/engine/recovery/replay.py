"""The last segment of a run is replayed: the core's decisions are compared, and the records make live requests of them.

It is the code that served the run, without its workers. What cannot be replayed is cut off, at a border of drains:
nothing of a drain is seen before all of it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import LogLine
from eventlm.core.core import Core
from eventlm.engine.backend import AttemptId
from eventlm.engine.backends.answers import Answer
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.group_admission import reply_with_sinks
from eventlm.engine.live_requests import LiveRequests, Sink, ignore_output
from eventlm.engine.request import Request
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.loose_edge import LooseEdge
from eventlm.engine.spool.records import (
    AnswerEndRecord,
    ArrivalRecord,
    DeltasRecord,
    FailureRecord,
    GrammarErrorRecord,
    Record,
    StepRecord,
)
from eventlm.errors import InvariantError
from eventlm.events import (
    Arrived,
    Decision,
    Fact,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    GrammarReady,
    Header,
    Launched,
    Marker,
    StepCompleted,
    Streamed,
    Withdrawn,
)
from eventlm.events.codec import DECISION_TAGS, encode_body
from eventlm.metrics.rows import EndedRows
from eventlm.sampling_params import SamplingParams
from eventlm.types import SequenceId
from eventlm.worker.protocol import StepPayload

#: In place of a token that is lost. No model has it.
LOST_TOKEN = -1

R = TypeVar("R")


class CutError(Exception):
    """The log cannot be followed beyond the drain that begins with event `s`. is_loss: more may have been seen."""

    def __init__(self, s: int, why: str, *, is_loss: bool = True) -> None:
        super().__init__(why)
        self.s = s
        self.is_loss = is_loss


class ReplayedCore(EngineCore):
    """Follows a log. damaged: the requests of which something is lost. drain_s: the first event of the present drain.

    records: by the facts that they belong to. A fact beyond the last of them that needs a record is not followed.
    """

    def __init__(
        self,
        header: Header,
        core: Core,
        live: LiveRequests,
        registry: RequestRegistry,
        records: Mapping[int, Record],
        *,
        bus: Bus,
        rows: EndedRows,
    ) -> None:
        super().__init__(
            header,
            core,
            live,
            clock=_StoppedClock(),
            bus=bus,
            ship=_ship_nothing,
            on_broken=_raise,
            rows=rows,
            forwarder=_NoForwarder(),
            checkpoint_events=0,
        )
        self.damaged: set[int] = set()
        self.drain_s = -1
        self._registry = registry
        self._records = records
        self._last_record = max(records, default=-1)
        self._expected: deque[Decision] = deque()
        self._is_open = False
        #: Of the group that arrives: its requests and their sinks; none if they are lost.
        self._arriving: list[tuple[Request, Sink]] = []

    def take(self, line: LogLine) -> None:
        """Apply the next line. Raises CutError."""
        try:
            self._take(line)
        except InvariantError as error:
            raise CutError(self.drain_s, str(error)) from error

    def finish(self) -> None:
        """There are no more lines. Raises CutError if those of the last drain are not all there."""
        if self._expected or self._is_open:
            # Its outputs have not left.
            raise CutError(self.drain_s, "the last drain is not complete", is_loss=False)
        self._deliver()

    def _take(self, line: LogLine) -> None:
        if line.tag in DECISION_TAGS:
            self._take_decision(line)
            return
        if self._expected:
            raise CutError(self.drain_s, f"a decision is missing before event {line.s}")
        event = line.event()
        if isinstance(event, Fact):
            self._take_fact(event)
        elif isinstance(event, Marker):
            self._take_marker(event)

    def _take_marker(self, marker: Marker) -> None:
        self._deliver()
        self.drain_s = marker.s
        if marker.s == self.core.next_seq:
            self.core.apply(marker)
        elif not marker.s:
            # The core began with it.
            return
        self._see_marker(marker)

    def _take_fact(self, fact: Fact) -> None:
        if not self._is_open:
            self._deliver()
            self.drain_s = fact.s
        self._is_open = not fact.p
        self._prepare(fact)
        self._see_fact(fact)
        decisions = self.core.apply(fact)
        self._loop.tell_of_workers(fact, decisions)
        self._expected.extend(decisions)

    def _take_decision(self, line: LogLine) -> None:
        if not self._expected or encode_body(self._expected[0]) != line.body:
            raise CutError(self.drain_s, f"event {line.s} is not what is decided now")
        self._carry_out(self._expected.popleft())

    def _prepare(self, fact: Fact) -> None:
        """Bring in what the record of a fact has, or what stands for it."""
        live = self.live
        match fact:
            case Arrived():
                if fact.group_index == 0:
                    self._arriving = self._begin_group(fact)
                lost: tuple[Request, Sink] = lost_request(fact), ignore_output
                live.arrive_again(fact, *(self._arriving[fact.group_index] if self._arriving else lost))
            case StepCompleted():
                computed = self._record(fact, StepRecord)
                if computed is None:
                    self.damaged |= live.requests_of_step(fact)
                tokens = [[LOST_TOKEN] * number for number in fact.produced] if computed is None else computed.tokens
                live.complete_again(fact, tokens, () if computed is None else computed.extras)
            case Streamed():
                went_on = self._record(fact, DeltasRecord)
                if went_on is None:
                    self.damaged.update(row[0] for row in fact.rows)
                live.answers.stream(dict(went_on.deltas) if went_on is not None else {})
            case ForwardEnded():
                ended = self._record(fact, AnswerEndRecord)
                if ended is None:
                    self.damaged.add(fact.request)
                else:
                    live.answers.end(AttemptId(fact.request, fact.index, fact.attempt), ended.ended)
            case ForwardFailed():
                failed = self._record(fact, FailureRecord)
                if failed is not None:
                    name = AttemptId(fact.request, fact.index, fact.attempt)
                    live.answers.note_failure(name, failed.failure)
            case GrammarReady(error=error) if error and fact.request in live:
                grammar = self._record(fact, GrammarErrorRecord)
                live.fail_grammar(fact.request, "it is invalid" if grammar is None else grammar.detail)

    def _record(self, fact: Fact, kind: type[R]) -> R | None:
        """The record of a fact; None if it is lost. Raises CutError if all from there on are."""
        if fact.s > self._last_record:
            raise CutError(self.drain_s, f"the spool ends before event {fact.s}")
        found = self._records.get(fact.s)
        return found if isinstance(found, kind) else None

    def _begin_group(self, fact: Arrived) -> list[tuple[Request, Sink]]:
        seqs = list(range(fact.s, fact.s + fact.group_size))
        submitted = self._record(fact, ArrivalRecord)
        if submitted is None:
            self.damaged.update(seqs)
            return []
        submission, on_admission = submitted.submission, _no_admission
        sinks: Sequence[Sink] = [ignore_output] * fact.group_size
        # A search has died with its edge.
        if submission is not None and not submission.goes_on and not submission.search_tokens:
            edge = LooseEdge()
            reply, sinks = reply_with_sinks(
                self._registry, submission, submitted.group, edge.puts(fact.group_size), charge=None
            )
            reply.loose_edge = edge

            def on_admission(reason: object, seqs: list[int]) -> None:
                if reason is None:
                    self._registry.add(reply, seqs)

        self._groups[fact.s] = (on_admission, seqs)
        return list(zip(submitted.group, sinks, strict=True))


def _no_admission(reason: object, seqs: list[int]) -> None:
    """Nobody waits for it."""


def lost_request(fact: Arrived) -> Request:
    """A request of which only the log is left."""
    return Request(
        prompt_token_ids=[LOST_TOKEN] * fact.prompt_tokens,
        sampling=SamplingParams(n=fact.n, max_tokens=fact.max_tokens or None),
        scheduling=fact.scheduling,
    )


class _StoppedClock:
    """The time is that of the log."""

    def now_ns(self) -> int:
        return 0

    def call_at(self, due_ns: int, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class _NoForwarder:
    """Sends nothing: that was done before."""

    def forward(self, forwarded: Forwarded, answer: Answer) -> None: ...

    def withdraw(self, withdrawn: Withdrawn) -> None: ...

    def finish(self, identity: SequenceId) -> None: ...


def _ship_nothing(launched: Launched, body: bytes, payload: StepPayload) -> None:
    """The workers are gone."""


def _raise(requests: list[int], error: Exception) -> None:
    raise error
