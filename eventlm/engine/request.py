"""What crosses the border between an edge (HTTP, command line) and the engine: requests in, outputs out.

An edge awaits `InferenceEngine.submit(group)` and then iterates over each `RequestHandle` until every sequence of the
request has a `FinishedOutput`. If the request has text ends, the edge owes exactly one `handle.text_ended(...)` for
each sequence: when it finds an end, else as its answer to `ClosingOutput`. A handle that is dropped must be cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Union

from msgspec import Struct, structs

from eventlm.engine.backend import AnswerDelta, AnswerUsage, BackendFailure, ForwardedRequest
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits, RateLimitState
from eventlm.errors import EventLMError, InputError, UsageError
from eventlm.metrics.rows import RequestRow
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import FinishReason


class QueueFullError(EventLMError):
    """The queue has no room for the group; none of its requests was admitted."""


class GroupSizeError(QueueFullError):
    """The group has more sequences than even an idle engine can hold; none of its requests was admitted."""


class ContextLengthError(EventLMError):
    """A prompt and its max_tokens exceed the context."""


class RequestFieldError(InputError):
    """A field of a request is outside its limits. `limits` completes the sentence "it must be ..."."""

    def __init__(self, param: str, limits: str) -> None:
        super().__init__(param, f"Invalid value for '{param}': it must be {limits}.")
        # The arguments of this class, so that another process can raise it again.
        self.args = (param, limits)


class TokenIdError(UsageError):
    """A request names a token that the model does not have."""


class EngineUnavailableError(EventLMError):
    """The engine is loading, draining or dead."""


class ModelBusyError(EventLMError):
    """No replica of the model is up, or its oldest waiting request waits too long, and the group gives way then."""


class UnknownReplyError(EventLMError):
    """There is no such reply, it is no longer kept, or it belongs to another owner."""


class KeyReusedError(EventLMError):
    """The submission's idempotency key belongs to a reply to another request."""


class KeyTakenError(EventLMError):
    """A reply to the same request has the submission's idempotency key; it can be joined."""


#: Why a request was cancelled: the client left; its owner or an operator asked for it; the engine stops; its outputs
#: could not be delivered; a search needs it no longer; its engine died, and nobody can come back for it.
CLIENT_LEFT = "client"
BY_OWNER = "owner"
BY_OPERATOR = "admin"
AT_SHUTDOWN = "shutdown"
OUTPUT_FAILED = "output_failed"
PRUNED = "pruned"
BY_RECOVERY = "recovery"

#: Detail of an `error`: the model computed NaN or infinity in place of the logits of the next token.
LOGITS_NOT_FINITE = "logits_not_finite"


class BeamSettings(Struct, frozen=True):
    """A beam search: how many beams it has, and the power of a beam's length by which its score is divided."""

    width: int
    length_penalty: float = 1.0


class Request(Struct, frozen=True, kw_only=True):
    """One prompt, how its tokens are chosen and how it is scheduled.

    If `sampling.seed` is None the engine draws a seed and records it. The times in `scheduling` are those of
    `InferenceEngine.now_ns`. The engine ignores the rest, which only the caller's text needs: `visible_token_ids` are
    special tokens that are always shown, and `message_format`, a struct of the caller's own, describes what a chat
    message may hold. A request with `beams` is not for the engine: its `n` sequences are the best that
    `eventlm.text.beam_search.search` finds. `forwarded` is what another server gets of it; the token ids of its prompt
    then only serve to count and to route.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    scheduling: SchedulingParams
    cache_salt: str = ""
    visible_token_ids: tuple[int, ...] = ()
    message_format: bytes = b""
    beams: BeamSettings | None = None
    forwarded: ForwardedRequest | None = None

    @property
    def n(self) -> int:
        """Number of sequences."""
        return self.sampling.n

    @property
    def num_at_once(self) -> int:
        """Number of sequences that run at once: `n`, or the beams of a search."""
        return self.beams.width if self.beams is not None else self.n

    @property
    def max_tokens(self) -> int:
        """Most tokens that each sequence produces; 0 for score and pool."""
        return self.sampling.max_tokens or 0 if self.scheduling.kind == "generate" else 0

    def with_scheduling(self, **changes: Any) -> Request:
        """The same request with other values of these fields of `scheduling`."""
        return structs.replace(self, scheduling=structs.replace(self.scheduling, **changes))


#: How long requests wait for an engine that goes on where the one before has ended.
RECOVERY_SECONDS = 10.0


class ModelState(NamedTuple):
    """A served model. max_model_len: its longest context in tokens. is_available: whether a worker of it is up."""

    max_model_len: int
    is_available: bool = True


class IdempotencyKey(Struct, frozen=True, array_like=True):
    """A key that a client has chosen for a request, so that it runs once however often it comes. Digests only, because
    the key may be a secret. request: of what must be the same each time.
    """

    digest: bytes
    request: bytes


class Submission(Struct, frozen=True, kw_only=True):
    """A group of requests as its edge submits it: one reply.

    reply_id: the reply's public id, such as `chatcmpl-...`. owner: see `Principal.owner`. edge_state: what an edge
    needs to make the same reply from the same outputs again; the engine only stores it. is_resumable: whether the
    outputs are kept for a client that lost its connection. edge_returns: whether they are kept for its edge, which may
    live on when the engine's process has died. runs_on: whether a resumable reply goes on without a reader.
    limits: what the owner may use. account: where that is counted, if not with the owner's other use. request_id: a
    second id for look-ups. A client may have chosen it (`x-request-id`); it stands for the newest such reply of the
    owner. traceparent: the caller's span, for exported spans; it is not recorded. gives_way_ns: from 0 on, the group is
    refused with a ModelBusyError while no replica of its model is up, and above 0 also once the oldest request that
    waits for the model has waited so long. idempotency_key: the reply is resumable then, and may have several readers.

    A search consists of several groups with the same reply_id, and lasts until its edge leaves the reply. Its first
    group has `search_tokens`, the most tokens of its prompts and outputs, and `search_sequences`, the most sequences at
    once. It is charged as one request with all the tokens, and admitted as a group of so many sequences. In the others
    `goes_on` is true; they are charged with nothing and always have room. `search_choices` is how many results it has.
    """

    reply_id: str
    owner: str = ""
    edge_state: bytes = b""
    is_resumable: bool = False
    edge_returns: bool = False
    runs_on: bool = False
    limits: RateLimits = NO_LIMITS
    account: str = ""
    request_id: str = ""
    search_tokens: int = 0
    search_sequences: int = 0
    search_choices: int = 0
    traceparent: str = ""
    goes_on: bool = False
    gives_way_ns: int = -1
    idempotency_key: IdempotencyKey | None = None

    @property
    def keeps_outputs(self) -> bool:
        """Whether the outputs are kept."""
        return self.is_resumable or self.edge_returns

    @property
    def stays_open(self) -> bool:
        """Whether the reply lasts until its edge leaves it, and not only until its requests are over."""
        return self.keeps_outputs or self.search_tokens > 0


class ResumedReply(Struct, frozen=True, kw_only=True):
    """A reply that is read again: what was submitted, the seqs of its arrivals, and the number of the new reader.

    num_outputs: how many outputs there are so far; the reader gets them from the first on. rewinds: how many there were
    each time that an engine took the reply over and had perhaps lost some.
    """

    submission: Submission
    group: list[Request]
    requests: list[int]
    reader: int
    num_outputs: int
    rewinds: list[int] = []


class TokensOutput(Struct, frozen=True, tag="tokens", array_like=True):
    """New tokens of sequence `index`; their fact is in the trace. `start`: position of the first in the output."""

    index: int
    start: int
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None


class TextOutput(Struct, frozen=True, tag="text", array_like=True):
    """What another server's answer for sequence `index` goes on with. `start`: output tokens before it."""

    index: int
    start: int
    delta: AnswerDelta


class PromptLogprobsOutput(Struct, frozen=True, tag="prompt_logprobs", array_like=True):
    """Log-probabilities of prompt tokens from position `start` on, as sequence `index` computed them.

    They come in the order of the prompt, but some may come again after a preemption.
    """

    index: int
    start: int
    logprobs: TokenLogprobs


class PooledOutput(Struct, frozen=True, tag="embedding", array_like=True):
    """The pooled embedding of the prompt, little-endian float32, as sequence `index` computed it."""

    index: int
    embedding: bytes


class ClosingOutput(Struct, frozen=True, tag="closing", array_like=True):
    """Sequence `index` ended at `position` output tokens; the edge owes its `text_ended` if it has not sent it."""

    index: int
    reason: FinishReason
    position: int


class FinishedOutput(Struct, frozen=True, tag="finished", array_like=True):
    """Sequence `index` is over. Only its first `position` tokens belong to the output.

    row: its metrics, as the log has them. detail: for an `error`, LOGITS_NOT_FINITE, or why the request's own grammar
    cannot be followed, which may quote the request; for `cancelled`, the reason as in `Cancelled.reason`.

    Of a forwarded request also: `usage`, the other server's own counts; `stop_reason`, as in `AnswerEnd`; `failure`, of
    the last attempt, if that is why it ended.
    """

    index: int
    reason: FinishReason
    position: int
    cached_tokens: int
    row: RequestRow | None = None
    detail: str = ""
    usage: AnswerUsage | None = None
    stop_reason: str | int | None = None
    failure: BackendFailure | None = None


class TakenOver(Struct, frozen=True, tag="taken_over", array_like=True):
    """Another reader has taken over the reply, and this one must end."""


RequestOutput = Union[  # noqa: UP007
    TokensOutput, TextOutput, PromptLogprobsOutput, PooledOutput, ClosingOutput, FinishedOutput
]
#: Gets the outputs of a group in the engine's order: the index of the request in the group, and an output, or the
#: error that ends the request.
OnOutput = Callable[[int, RequestOutput | TakenOver | EventLMError], None]
#: The same for one request of the group.
Put = Callable[[RequestOutput | TakenOver | EventLMError], None]


class RequestHandle:
    """A live request as its edge sees it. Iterating ends after the last sequence's `FinishedOutput`, or when another
    reader takes the reply over.

    `request` is the arrival's seq. Iterating raises EngineUnavailableError if the engine dies first. With `put`, the
    outputs go there, and there is nothing to iterate over. `rate_limits` is what the owner had left at its admission,
    if the owner has limits.
    """

    def __init__(
        self,
        request: int,
        n: int,
        text_ended: Callable[[int, int, int, str], None],
        cancel: Callable[[int, str], None],
        put: Put | None = None,
    ) -> None:
        self.request = request
        self.rate_limits: RateLimitState | None = None
        self._unfinished = n
        self._text_ended = text_ended
        self._cancel = cancel
        self._outputs: asyncio.Queue[RequestOutput | TakenOver | EventLMError] = asyncio.Queue()
        #: The engine's side: takes an output, or the error that ends the request.
        self.put: Put = put or self._outputs.put_nowait

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._unfinished:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if isinstance(output, EventLMError):
            self._unfinished = 0
            raise output
        if isinstance(output, TakenOver):
            self._unfinished = 0
            raise StopAsyncIteration
        if isinstance(output, FinishedOutput):
            self._unfinished -= 1
        return output

    def text_ended(self, index: int, position: int, reason: str = "") -> None:
        """Report that the text of sequence `index` ends at `position` tokens, or was checked up to there."""
        self._text_ended(self.request, index, position, reason)

    def cancel(self, reason: str = CLIENT_LEFT) -> None:
        """End the request; does nothing if it has ended."""
        self._cancel(self.request, reason)
