"""Messages between the engine's process and a front end: msgpack over a socket pair. No pickle, no code.

The engine sends `FrontEndSetup` first. A front end of a server with `--recover` outlives its engine: the next one sends
it a `FrontEndSetup` over another connection, and once that one is ready the front end names its streams in `ComeBack`.

The front end answers `FrontEndReady` or `FrontEndFailed`, then sends a `Beat`
every second. A front end calls the engine with a `Call` that holds one `Operation`, and gets a `CallResult` or a
`CallError`. If the operation has outputs (those of submitted requests, or of a resumed reply), they follow under the
call's number; all outputs of one tick travel in one message. A `Notification` has no answer.

To add an operation: a struct in `Operation` or `Notification`, a case in `eventlm.frontend.link.FrontEndLink`, and a
method of `eventlm.frontend.remote_engine.RemoteEngine`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar, Union

import msgspec
from msgspec import Raw, Struct

from eventlm.config import Config
from eventlm.engine.admin import (
    AdminAction,
    AmbiguousRequestError,
    RestartError,
    UnknownPolicyError,
    UnknownRequestError,
)
from eventlm.engine.backends.backend_set import UnknownBackendError
from eventlm.engine.explanations import NotExplainedError
from eventlm.engine.object_store.actions import (
    DuplicateItemError,
    ObjectAction,
    ObjectHeldError,
    ObjectStoreError,
    ObjectTooLargeError,
    UnknownObjectError,
)
from eventlm.engine.rate_limits import RateLimitError, RateLimits, RateLimitState
from eventlm.engine.reports import NoReportError
from eventlm.engine.request import (
    ClosingOutput,
    ContextLengthError,
    EngineUnavailableError,
    FinishedOutput,
    GroupSizeError,
    IdempotencyKey,
    KeyReusedError,
    KeyTakenError,
    ModelBusyError,
    ModelState,
    PooledOutput,
    PromptLogprobsOutput,
    QueueFullError,
    Request,
    RequestFieldError,
    Submission,
    TakenOver,
    TextOutput,
    TokenIdError,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.errors import EventLMError, InputError, InvalidTypeError, UsageError
from eventlm.metrics.components import HttpRequests
from eventlm.types import ModelImpl

T = TypeVar("T")


class FrontEndModel(Struct, frozen=True, kw_only=True):
    """A further replicaset's model: a checkpoint folder or `fake`, who computes it, and the names that requests use.
    model, tokenizer: as of `EngineSetup`.
    """

    model: str
    tokenizer: str = ""
    model_impl: ModelImpl
    model_names: list[str]
    vocab_size: int
    num_slots: int


class FrontEndSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """What a front end needs to start.

    index: counts from 1. model, tokenizer: as of `EngineSetup`. origin_ns: the host's monotonic time at which the run's
    clock is 0. created: unix time that /v1/models reports. server_id: as /version reports it. session_key: from which
    numbers of sessions are made. goes_on: whether the engine goes on where the one before has ended.
    """

    index: int
    config: Config
    model: str
    tokenizer: str = ""
    model_names: list[str]
    max_model_len: int
    vocab_size: int
    origin_ns: int
    created: int
    server_id: str = ""
    session_key: bytes = b""
    state: str = "loading"
    paused: bool = False
    has_worker: bool = True
    num_waiting_for_room: int = 0
    others: list[FrontEndModel] = []
    models: dict[str, ModelState] = {}
    goes_on: bool = False


class StateChanged(Struct, frozen=True, kw_only=True, tag="state"):
    """The engine's state, whether it is paused, its context length, which its workers may have reduced, whether any
    replica has a worker, and how many replicas wait for room for one. origin_ns: as of FrontEndSetup; that of an engine
    which goes on with a run is known once it is ready.
    """

    state: str
    paused: bool
    max_model_len: int
    has_worker: bool = True
    num_waiting_for_room: int = 0
    models: dict[str, ModelState] = {}
    origin_ns: int = 0


class Lost(Struct, frozen=True, array_like=True, tag="lost"):
    """The engine died while it served a request."""

    message: str


StreamOutput = Union[  # noqa: UP007
    TokensOutput, TextOutput, PromptLogprobsOutput, PooledOutput, ClosingOutput, FinishedOutput, TakenOver, Lost
]


class Outputs(Struct, frozen=True, tag="outputs"):
    """Outputs in order: the call's number, the request's index in its group, and the output."""

    items: list[tuple[int, int, StreamOutput]]


class CallResult(Struct, frozen=True, tag="answer"):
    """What call `id` returned."""

    id: int
    result: Raw


class CallError(Struct, frozen=True, tag="call_error"):
    """What call `id` raised: one of `ERRORS`, with its arguments."""

    id: int
    kind: str
    arguments: list[Any]


class Signal(Struct, frozen=True, tag="signal"):
    """reload: reload files that may have changed. drain: refuse new requests, finish the running ones, and exit. cut:
    end the running requests now.
    """

    kind: Literal["reload", "drain", "cut"]


class FrontEndReady(Struct, frozen=True, tag="ready"):
    """It accepts connections."""


class FrontEndFailed(Struct, frozen=True, tag="failed"):
    """It cannot start."""

    message: str


class Beat(Struct, frozen=True, kw_only=True, tag="beat"):
    """A heartbeat: the number of generating requests, CPU time, memory, and counts of responses."""

    num_requests: int
    cpu_ns: int
    resident_bytes: int
    http_requests: HttpRequests = []


class Draining(Struct, frozen=True, tag="draining"):
    """It has begun to drain, with this many requests left."""

    num_requests: int


class Submit(Struct, frozen=True, tag="submit"):
    """`Engine.submit`. Returns a `Submitted`; the requests' outputs follow."""

    group: list[Request]
    submission: Submission | None = None


class Submitted(Struct, frozen=True):
    """The seqs of the submitted requests, and what is left of their owner's limits."""

    requests: list[int]
    rate_limits: RateLimitState | None


class ResumeReply(Struct, frozen=True, tag="resume"):
    """`Engine.resume`. Returns a `ResumedReply`; its outputs follow."""

    reply_id: str
    owner: str
    limits: RateLimits


class JoinReply(Struct, frozen=True, tag="join"):
    """`Engine.join`. Returns a `ResumedReply`; its outputs follow."""

    key: IdempotencyKey
    owner: str
    limits: RateLimits


class ReturningStream(Struct, frozen=True, array_like=True):
    """A stream of the engine before. number: that of the call under which its outputs follow. num_had: how many outputs
    it has had. is_edge: it reads the reply that it has submitted.
    """

    number: int
    reply_id: str
    num_had: int
    is_edge: bool


class ReturnedStream(Struct, frozen=True, array_like=True):
    """The seqs of its requests, and the number of the reader."""

    requests: list[int]
    reader: int


class ComeBack(Struct, frozen=True, tag="come_back"):
    """`Engine.come_back` for each stream. Returns a ReturnedStream for each; None for one that cannot go on."""

    streams: list[ReturningStream]


class CallOnReply(Struct, frozen=True, tag="reply"):
    """`Engine.cancel_reply`, `Engine.status` or `Engine.explain`. Returns what that returns."""

    method: Literal["cancel_reply", "status", "explain"]
    reply_id: str
    owner: str | None


class GetMetrics(Struct, frozen=True, tag="metrics"):
    """`Engine.read_metrics`. Returns an `EngineMetrics`."""


class ListOldest(Struct, frozen=True, tag="list_oldest"):
    """`Engine.list_oldest`. Returns an `OldestRequests`."""

    limit: int


class MakeReport(Struct, frozen=True, tag="report"):
    """`Engine.report`. Returns the bytes of a page."""

    seconds: int


class Administer(Struct, frozen=True, tag="administer"):
    """`Engine.administer`. Returns an `EngineStatus`."""

    action: AdminAction


class CallOnObject(Struct, frozen=True, tag="object"):
    """An action of `Engine.objects`. Returns what its `result_type` says."""

    action: ObjectAction


Operation = Union[  # noqa: UP007
    Submit, ResumeReply, JoinReply, ComeBack, CallOnReply, GetMetrics, ListOldest, MakeReport, Administer, CallOnObject
]


class Call(Struct, frozen=True, tag="call"):
    """A call on the engine; `id` counts up."""

    id: int
    operation: Operation


class Abandon(Struct, frozen=True, tag="abandon"):
    """The caller of `id` no longer waits; no answer is needed."""

    id: int


class CancelRequest(Struct, frozen=True, tag="cancel"):
    """`RequestHandle.cancel`."""

    request: int
    reason: str


class EndText(Struct, frozen=True, tag="end_text"):
    """`RequestHandle.text_ended`."""

    request: int
    index: int
    position: int
    reason: str


class LeaveReply(Struct, frozen=True, tag="leave"):
    """`Engine.leave`."""

    reply_id: str
    reader: int


Notification = Union[CancelRequest, EndText, LeaveReply]  # noqa: UP007

ToFrontEnd = Union[FrontEndSetup, StateChanged, Outputs, CallResult, CallError, Signal]  # noqa: UP007
FromFrontEnd = Union[  # noqa: UP007
    FrontEndReady, FrontEndFailed, Beat, Draining, Call, Abandon, CancelRequest, EndText, LeaveReply
]

_to_front_end: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
_from_front_end: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)
encode = msgspec.msgpack.Encoder().encode
decode_to_front_end = _to_front_end.decode
decode_from_front_end = _from_front_end.decode


def call_result(call: int, result: Any) -> CallResult:
    """A `CallResult` that carries `result`."""
    return CallResult(call, Raw(encode(result)))


def decode_result(result: Raw, result_type: type[T]) -> T:
    """Decode the result of a call."""
    return msgspec.msgpack.decode(result, type=result_type)


#: Errors that are raised again on the other side, built from their arguments alone.
ERRORS: dict[str, type[EventLMError]] = {
    kind.__name__: kind
    for kind in (
        QueueFullError,
        GroupSizeError,
        RateLimitError,
        ContextLengthError,
        TokenIdError,
        RequestFieldError,
        InputError,
        InvalidTypeError,
        EngineUnavailableError,
        ModelBusyError,
        KeyReusedError,
        KeyTakenError,
        UnknownReplyError,
        UnknownPolicyError,
        UnknownRequestError,
        AmbiguousRequestError,
        RestartError,
        UnknownBackendError,
        NotExplainedError,
        NoReportError,
        ObjectStoreError,
        UnknownObjectError,
        ObjectHeldError,
        DuplicateItemError,
        ObjectTooLargeError,
        UsageError,
        EventLMError,
    )
}


def call_error(call: int, error: EventLMError) -> CallError:
    """Encode an error as its nearest base class that the other side knows."""
    kind = next(name for name in (base.__name__ for base in type(error).__mro__) if name in ERRORS)
    return CallError(call, kind, list(error.args))


def error_from(call_error: CallError) -> EventLMError:
    """The error that a `CallError` stands for."""
    return ERRORS[call_error.kind](*call_error.arguments)
