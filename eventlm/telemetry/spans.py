"""SpanBuilder: a fold over the log to OpenTelemetry spans, without a client library.

    llm_request              a request, from its reception to its last end; its parent is the caller's span, if known
      sample                 each of its samples, if it has several
        edge, queue, prefill, decode, preempted, recompute, retry, text_end
        attempt            to have another server answer it

Phases follow each other without gaps, so their durations add up to the span above them. Attempts lie beside them, and
one may begin while another goes on. Attributes are those of the
semantic conventions for generative AI, those that vLLM and SGLang add (`gen_ai.latency.*`, in seconds, and
`gen_ai.usage.*_tokens`), and our own with the prefix `eventlm.`. Ids are hashes of the run's name and the request, so
that the same log always gives the same spans. A request that was live where the log begins is one from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import xxhash
from msgspec import Struct

from eventlm.events import Arrived, Event, Finished, Header, Preempted, Rejected
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.telemetry.attempts import NO_FAILURES, TracedAttempt
from eventlm.telemetry.phases import PhaseFold, TracedSequence, TracedStep
from eventlm.types import NANOSECONDS_PER_SECOND, RequestKind, TimeWindow

Attribute = str | int | float | list[str]
Attributes = dict[str, Attribute]

ROOT_NAME: Final = "llm_request"
#: Values of `gen_ai.operation.name`. The log does not tell a chat from a completion.
_OPERATIONS: dict[RequestKind, str] = {"generate": "text_completion", "pool": "embeddings", "score": "score"}
#: Attributes, and the fields of a metrics row that they come from.
_LATENCIES = {
    "gen_ai.latency.time_in_queue": "request_scheduling_delay",
    "gen_ai.latency.time_to_first_token": "prefill_e2e_time",
    "gen_ai.latency.e2e": "request_e2e_time",
    "gen_ai.latency.time_in_model_prefill": "request_prefill_time",
    "gen_ai.latency.time_in_model_decode": "request_decode_time",
    "gen_ai.latency.time_in_model_inference": "request_inference_time",
}


class SpanContext(NamedTuple):
    """A span of the caller, as `traceparent` names it: 32 and 16 hex digits. is_sampled: whether it is recorded."""

    trace_id: str
    span_id: str
    is_sampled: bool = True


class SpanEvent(NamedTuple):
    """Something that happened during a span, at `ns` since 1970."""

    name: str
    ns: int
    attributes: Attributes


class Span(Struct, frozen=True, kw_only=True):
    """A finished span. Times in ns since 1970. parent_id: empty for none. error: empty for none."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    start_ns: int
    end_ns: int
    attributes: Attributes = {}
    events: list[SpanEvent] = []
    error: str = ""


class _Request(Struct, kw_only=True):
    """A request with samples that have not ended: `num_open` of them."""

    arrival: Arrived
    start_ns: int
    num_open: int = 0
    reasons: list[str]
    events: list[SpanEvent] = []
    output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0


class SpanBuilder:
    """`apply` takes events in the order of the log, the header first; `finish` is called after the last.

    emit: gets each span once it has ended, a root after what lies below it. parent_of: the caller's span of a request,
    if it is known; the log does not hold it. If that span is not recorded, there are none of the request. window: make
    spans only of requests that arrive in it.
    """

    def __init__(
        self,
        emit: Callable[[Span], None],
        *,
        parent_of: Callable[[int], SpanContext | None] = lambda _: None,
        window: TimeWindow | None = None,
    ) -> None:
        self._emit = emit
        self._parent_of = parent_of
        self._run = ""
        self._unix_start_ns = 0
        self._store = MetricsStore(sink=self)
        self._phases = PhaseFold(self, window=window)
        self._rows: dict[tuple[int, int], RequestRow] = {}
        self._requests: dict[int, _Request] = {}
        #: The callers of live requests, asked for once.
        self._parents: dict[int, SpanContext | None] = {}

    def apply(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Header) and not self._run:
            self._run, self._unix_start_ns = event.run, max(int(event.unix_start_ns), 0)
        # First, because a finish makes a row.
        self._store.apply(event)
        self._phases.apply(event)
        self._rows.clear()

    def finish(self) -> None:
        """After the last event: what is live ends there as unfinished."""
        self._phases.finish()

    @property
    def oldest_live(self) -> int | None:
        """The first request that has not ended; None if there is none."""
        return self._phases.oldest_live

    def sequence_began(self, sequence: TracedSequence) -> None:
        """Open its request with its first sample."""
        arrival = sequence.arrival
        if arrival.s not in self._requests:
            self._requests[arrival.s] = _Request(arrival=arrival, start_ns=sequence.start_ns, reasons=[])
            self._parents[arrival.s] = self._parent_of(arrival.s)
        self._requests[arrival.s].num_open += 1

    def phase_began(self, sequence: TracedSequence) -> None:
        """Its span is made when it ends."""

    def phase_ended(self, sequence: TracedSequence, ns: int) -> None:
        """A phase becomes a span."""
        request, index = sequence.identity
        attributes: Attributes = {}
        if sequence.phase not in ("edge", "queue", "preempted", "retry"):
            attributes["eventlm.replica"] = sequence.replica
        self._send(
            request,
            Span(
                name=sequence.phase,
                trace_id=self._trace_id(request),
                span_id=self._id(request, index, sequence.phase, sequence.phase_ns),
                parent_id=self._parent_id(sequence.arrival, index),
                start_ns=self._unix_start_ns + sequence.phase_ns,
                end_ns=self._unix_start_ns + ns,
                attributes=attributes,
            ),
        )

    def preempted(self, sequence: TracedSequence, event: Preempted, by: TracedSequence | None) -> None:
        """A preemption becomes an event of the request's span."""
        attributes: Attributes = {"eventlm.reason": event.reason, "eventlm.replica": event.replica}
        if event.by is not None:
            attributes["eventlm.by"] = by.name if by is not None else str(event.by[0])
        request = self._requests[sequence.arrival.s]
        request.events.append(SpanEvent("preempted", self._unix_start_ns + event.ts, attributes))

    def sequence_ended(self, sequence: TracedSequence, ns: int, outcome: str, finished: Finished | None) -> None:
        """It becomes a span, and so does its request with its last sample."""
        request = self._requests[sequence.arrival.s]
        request.num_open -= 1
        request.reasons.append(outcome)
        request.num_preemptions += sequence.num_preemptions
        if finished is not None:
            request.output_tokens += finished.position
            request.cached_tokens += finished.cached_tokens
        attributes: Attributes = {"eventlm.replica": sequence.replica, "eventlm.preemptions": sequence.num_preemptions}
        if (row := self._rows.get(sequence.identity)) is not None:
            for name, field in _LATENCIES.items():
                if (value := getattr(row, field)) is not None:
                    attributes[name] = value / NANOSECONDS_PER_SECOND
        if request.arrival.n == 1:
            self._end(request, ns, attributes)
            return
        self._send(
            sequence.arrival.s,
            Span(
                name="sample",
                trace_id=self._trace_id(sequence.arrival.s),
                span_id=self._id(*sequence.identity),
                parent_id=self._id(sequence.arrival.s),
                start_ns=self._unix_start_ns + sequence.start_ns,
                end_ns=self._unix_start_ns + ns,
                attributes=attributes
                | {"gen_ai.response.finish_reasons": [outcome], "eventlm.sample": sequence.index}
                | ({"gen_ai.usage.output_tokens": finished.position} if finished is not None else {}),
                error=outcome if outcome == "error" else "",
            ),
        )
        if not request.num_open:
            self._end(request, ns, {"eventlm.preemptions": request.num_preemptions})

    def _end(self, request: _Request, ns: int, attributes: Attributes) -> None:
        usage: Attributes = {
            "gen_ai.usage.output_tokens": request.output_tokens,
            "gen_ai.usage.completion_tokens": request.output_tokens,
            "gen_ai.usage.cached_tokens": request.cached_tokens,
            "gen_ai.response.finish_reasons": request.reasons,
        }
        error = "error" if "error" in request.reasons else ""
        attributes |= usage
        self._emit_root(request.arrival, request.start_ns, ns, attributes, error=error, events=request.events)
        del self._requests[request.arrival.s]

    def request_rejected(self, arrival: Arrived, event: Rejected) -> None:
        """A span without phases."""
        self._parents[arrival.s] = self._parent_of(arrival.s)
        start_ns = min(arrival.scheduling.received_ns or arrival.ts, arrival.ts)
        self._emit_root(arrival, start_ns, event.ts, {}, error=f"rejected: {event.reason}", events=[])

    def _emit_root(
        self,
        arrival: Arrived,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        error: str,
        events: list[SpanEvent],
    ) -> None:
        parent = self._parents.get(arrival.s)
        span = Span(
            name=ROOT_NAME,
            trace_id=self._trace_id(arrival.s),
            span_id=self._id(arrival.s),
            parent_id=parent.span_id if parent is not None else "",
            start_ns=self._unix_start_ns + start_ns,
            end_ns=self._unix_start_ns + end_ns,
            attributes=_of_arrival(arrival) | attributes | ({"error.type": error} if error else {}),
            events=events,
            error=error,
        )
        self._send(arrival.s, span)
        del self._parents[arrival.s]

    def _send(self, request: int, span: Span) -> None:
        parent = self._parents[request]
        if parent is None or parent.is_sampled:
            self._emit(span)

    def step_ended(self, step: TracedStep) -> None:
        """Steps are no spans: they belong to many requests."""

    def attempt_ended(self, attempt: TracedAttempt) -> None:
        """One at another server becomes a span beside the phases of its sequence."""
        request = self._requests.get(attempt.request)
        if request is None:
            return
        attributes: Attributes = {
            "eventlm.attempt": attempt.number,
            "eventlm.replica": attempt.replica,
            "eventlm.end": attempt.end,
            "eventlm.hedge": str(attempt.is_hedge).lower(),
            "gen_ai.usage.output_tokens": attempt.total - attempt.before,
        }
        if backend := self._store.backend_name(attempt.replica):
            attributes["server.address"] = backend
        if attempt.first_ns >= 0:
            attributes["eventlm.first_token_seconds"] = (attempt.first_ns - attempt.sent_ns) / NANOSECONDS_PER_SECOND
        if attempt.status:
            attributes["http.response.status_code"] = attempt.status
        error = "" if attempt.end in NO_FAILURES else attempt.end
        self._send(
            attempt.request,
            Span(
                name="attempt",
                trace_id=self._trace_id(attempt.request),
                span_id=self._id(attempt.request, attempt.index, "attempt", attempt.number),
                parent_id=self._parent_id(request.arrival, attempt.index),
                start_ns=self._unix_start_ns + attempt.sent_ns,
                end_ns=self._unix_start_ns + attempt.ended_ns,
                attributes=attributes | ({"error.type": error} if error else {}),
                error=error,
            ),
        )

    def request_ended(self, row: RequestRow) -> None:
        """Keep the row for the end of the sequence, which is the same event."""
        self._rows[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        """Rows of steps are not needed."""

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Nor are those of tokens."""

    def _parent_id(self, arrival: Arrived, index: int) -> str:
        """Of what lies below a sequence: its own span if its request has several, else the request's."""
        return self._id(arrival.s, index) if arrival.n > 1 else self._id(arrival.s)

    def _trace_id(self, request: int) -> str:
        parent = self._parents[request]
        return parent.trace_id if parent is not None else xxhash.xxh3_128_hexdigest(f"{self._run}/{request}".encode())

    def _id(self, *parts: int | str) -> str:
        return xxhash.xxh3_64_hexdigest("/".join(map(str, (self._run, *parts))).encode())


def _of_arrival(arrival: Arrived) -> Attributes:
    """What is known of a request before it is served."""
    scheduling = arrival.scheduling
    attributes: Attributes = {
        "gen_ai.operation.name": _OPERATIONS[scheduling.kind],
        "gen_ai.provider.name": "eventlm",
        "gen_ai.request.model": scheduling.adapter or scheduling.model,
        "gen_ai.response.model": scheduling.adapter or scheduling.model,
        "gen_ai.request.id": str(arrival.s),
        "gen_ai.request.max_tokens": arrival.max_tokens,
        "gen_ai.request.n": arrival.n,
        "gen_ai.usage.num_sequences": arrival.n,
        "gen_ai.usage.input_tokens": arrival.prompt_tokens,
        "gen_ai.usage.prompt_tokens": arrival.prompt_tokens,
        "eventlm.request": arrival.s,
        "eventlm.priority": scheduling.priority,
    }
    optional: Attributes = {
        "eventlm.service_class": scheduling.service_class,
        "gen_ai.conversation.id": str(scheduling.session or ""),
    }
    return attributes | {name: value for name, value in optional.items() if value}
