"""What travels between the engine's process and a front end, as msgpack over a socket pair. No pickle, no code.

The engine talks first (`FrontEndSetup`), the front end answers `FrontEndReady` or `FrontEndFailed` and then sends a
`Beat` a second. What a front end asks of the engine is a `Call` of one of the structs in `Question`; it gets an
`Answer` or a `Refusal`, and where the question has outputs (of the requests that it submits, of a reply that it
resumes) those come under the call's number, all of one tick in one message. A `Word` has no answer.

To let front ends ask something new: a struct in `Question` or `Word`, a line in `eventlm.frontend.calls`, and
a method of `eventlm.frontend.remote_engine.RemoteEngine`.
"""

from __future__ import annotations

from typing import Any, TypeVar, Union

import msgspec
from msgspec import Raw, Struct

from eventlm.config import Config
from eventlm.engine.admin import AdminAction, AmbiguousRequestError, UnknownPolicyError, UnknownRequestError
from eventlm.engine.explanations import NotExplainedError
from eventlm.engine.rate_limits import RateLimitError, RateLimits, RateLimitState
from eventlm.engine.request import (
    ClosingOutput,
    ContextLengthError,
    EmbeddingOutput,
    EngineRequest,
    EngineUnavailableError,
    FinishedOutput,
    GroupSizeError,
    PromptLogprobsOutput,
    QueueFullError,
    RequestFieldError,
    Submission,
    TakenOver,
    TokenIdError,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.errors import EventLMError, UsageError
from eventlm.metrics.components import HttpRequests

T = TypeVar("T")


class FrontEndSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """What a front end must know before it can start.

    index: from 1. model: a checkpoint folder, or `fake`. origin_ns: where the run's clock stands at 0, on this host's
    monotonic one. created: unix time that /v1/models tells.
    """

    index: int
    config: Config
    model: str
    model_names: list[str]
    max_model_len: int
    vocab_size: int
    origin_ns: int
    created: int
    state: str = "loading"
    paused: bool = False


class StateChanged(Struct, frozen=True, kw_only=True, tag="state"):
    """The engine's state, whether it is paused, and its longest context, which its workers may have cut."""

    state: str
    paused: bool
    max_model_len: int


class Lost(Struct, frozen=True, array_like=True, tag="lost"):
    """The engine died under a request."""

    message: str


StreamOutput = Union[  # noqa: UP007
    TokensOutput, PromptLogprobsOutput, EmbeddingOutput, ClosingOutput, FinishedOutput, TakenOver, Lost
]


class Outputs(Struct, frozen=True, tag="outputs"):
    """Outputs in their order: the call's number, the place of the request in its group, and what is said of it."""

    items: list[tuple[int, int, StreamOutput]]


class Answer(Struct, frozen=True, tag="answer"):
    """What call `id` returned."""

    id: int
    result: Raw


class Refusal(Struct, frozen=True, tag="refusal"):
    """What call `id` raised: one of `ERRORS`, with its arguments."""

    id: int
    kind: str
    arguments: list[Any]


class Reload(Struct, frozen=True, tag="reload"):
    """Read again what may have changed on the disk."""


class Drain(Struct, frozen=True, tag="drain"):
    """Refuse new requests, let those that run end, and leave."""


class Cut(Struct, frozen=True, tag="cut"):
    """End what still runs."""


class FrontEndReady(Struct, frozen=True, tag="ready"):
    """It takes connections."""


class FrontEndFailed(Struct, frozen=True, tag="failed"):
    """It cannot start."""

    message: str


class Beat(Struct, frozen=True, kw_only=True, tag="beat"):
    """It lives, and what it uses: requests that generate, processor time, memory; and what it has answered."""

    num_requests: int
    cpu_ns: int
    resident_bytes: int
    http_requests: HttpRequests = []


class Draining(Struct, frozen=True, tag="draining"):
    """It has begun to drain and waits for so many requests."""

    num_requests: int


class Submit(Struct, frozen=True, tag="submit"):
    """`Engine.submit`. The answer is a `Submitted`; the outputs of the requests come."""

    group: list[EngineRequest]
    submission: Submission | None = None


class Submitted(Struct, frozen=True):
    """The seqs of the requests that were submitted, and what their owner has left of its limits."""

    requests: list[int]
    rate_limits: RateLimitState | None


class Resume(Struct, frozen=True, tag="resume"):
    """`Engine.resume`. The answer is a `ResumedReply`; its outputs come."""

    reply_id: str
    owner: str
    limits: RateLimits


class CancelReply(Struct, frozen=True, tag="cancel_reply"):
    """`Engine.cancel_reply`. The answer is whether anything was under way."""

    reply_id: str
    owner: str


class AskStatus(Struct, frozen=True, tag="status"):
    """`Engine.status`. The answer is a `ReplyStatus`."""

    reply_id: str
    owner: str | None


class AskExplanation(Struct, frozen=True, tag="explain"):
    """`Engine.explain`. The answer is an `ExplainAnswer`."""

    reply_id: str
    owner: str


class ReadMetrics(Struct, frozen=True, tag="metrics"):
    """`Engine.read_metrics`. The answer is an `EngineMetrics`."""


class Administer(Struct, frozen=True, tag="administer"):
    """`Engine.administer`. The answer is an `EngineStatus`."""

    action: AdminAction


Question = Union[Submit, Resume, CancelReply, AskStatus, AskExplanation, ReadMetrics, Administer]  # noqa: UP007


class Call(Struct, frozen=True, tag="call"):
    """Something asked of the engine; `id` counts up."""

    id: int
    question: Question


class Abandon(Struct, frozen=True, tag="abandon"):
    """Nobody waits for the answer of call `id` any more, and it need not come."""

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


class Leave(Struct, frozen=True, tag="leave"):
    """`Engine.leave`."""

    reply_id: str
    reader: int


Word = Union[CancelRequest, EndText, Leave]  # noqa: UP007

ToFrontEnd = Union[FrontEndSetup, StateChanged, Outputs, Answer, Refusal, Reload, Drain, Cut]  # noqa: UP007
FromFrontEnd = Union[  # noqa: UP007
    FrontEndReady, FrontEndFailed, Beat, Draining, Call, Abandon, CancelRequest, EndText, Leave
]

_encoder = msgspec.msgpack.Encoder()
_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd)
_from_front_end = msgspec.msgpack.Decoder(FromFrontEnd)


def encode(message: Struct) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode_to_front_end(data: bytes) -> ToFrontEnd:
    """A message of the engine."""
    message: ToFrontEnd = _to_front_end.decode(data)
    return message


def decode_from_front_end(data: bytes) -> FromFrontEnd:
    """A message of a front end."""
    message: FromFrontEnd = _from_front_end.decode(data)
    return message


def answer(call: int, result: Any) -> Answer:
    """An answer that carries `result`."""
    return Answer(call, Raw(_encoder.encode(result)))


def decode_result(result: Raw, result_type: type[T]) -> T:
    """What an answer carries."""
    return msgspec.msgpack.decode(result, type=result_type)


#: Errors that are raised again at the other side, which needs no more of them than their arguments.
ERRORS: dict[str, type[EventLMError]] = {
    kind.__name__: kind
    for kind in (
        QueueFullError,
        GroupSizeError,
        RateLimitError,
        ContextLengthError,
        TokenIdError,
        RequestFieldError,
        EngineUnavailableError,
        UnknownReplyError,
        UnknownPolicyError,
        UnknownRequestError,
        AmbiguousRequestError,
        NotExplainedError,
        UsageError,
        EventLMError,
    )
}


def refusal(call: int, error: EventLMError) -> Refusal:
    """An error as it travels: as the nearest of its classes that the other side knows."""
    kind = next(name for name in (base.__name__ for base in type(error).__mro__) if name in ERRORS)
    return Refusal(call, kind, list(error.args))


def error_of(refusal: Refusal) -> EventLMError:
    """The error of a refusal."""
    return ERRORS[refusal.kind](*refusal.arguments)
