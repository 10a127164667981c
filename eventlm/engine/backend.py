"""What the engine needs of other servers, and what crosses between it and their clients.

A backend is a server that runs the model of a replicaset: vLLM, SGLang, llama.cpp, Ollama, another eventlm, or any
other that speaks OpenAI's API. `eventlm.gateway` has the clients; the engine knows them by these protocols.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from eventlm.config.backends import BackendKind, BackendSpec
from eventlm.errors import EventLMError
from eventlm.events.forwarding import FailureKind
from eventlm.types import FinishReason

Endpoint = Literal["chat", "completions", "embeddings"]


class AttemptId(NamedTuple):
    """An attempt to have a backend answer one sequence."""

    request: int
    index: int  # type: ignore[assignment]  # hides tuple.index on purpose
    attempt: int


class ForwardedRequest(Struct, frozen=True, kw_only=True):
    """What is forwarded of a request.

    body: a JSON object as OpenAI's API has it, with all parameters of the client but `model`, `n`, `seed`, `stream`
    and `stream_options`, which each attempt sets. prompt: what the body holds a conversation in (`messages`) or a text.
    """

    endpoint: Endpoint
    body: bytes


class CallPart(NamedTuple):
    """The next part of tool call number `index`. Only the first part has `name`."""

    index: int  # type: ignore[assignment]  # hides tuple.index on purpose
    name: str
    arguments: str


class AnswerDelta(Struct, frozen=True, array_like=True):
    """What a backend's answer goes on with.

    num_tokens: output tokens with this, as the backend counts them, else one for each chunk. token_ids: those of this
    delta, where the backend tells them. logprobs: JSON, empty if none was asked for: a list with what OpenAI's chats
    have for each token, or the object that its completions have. embedding: little-endian float32. is_counted:
    whether num_tokens is exact.
    """

    text: str = ""
    num_tokens: int = 0
    reasoning: str = ""
    calls: list[CallPart] = []
    token_ids: list[int] = []
    logprobs: bytes = b""
    embedding: bytes = b""
    is_counted: bool = True


class AnswerUsage(Struct, frozen=True):
    """Token counts as a backend reports them at the end; -1: it did not say."""

    prompt: int = -1
    completion: int = -1
    cached: int = -1
    reasoning: int = -1


class AnswerEnd(Struct, frozen=True):
    """The end of an answer. stop_reason: the stop string or stop token that ended it, if the backend says so."""

    reason: FinishReason
    usage: AnswerUsage = AnswerUsage()
    stop_reason: str | int | None = None


class BackendFailure(Struct, frozen=True, array_like=True):
    """A `BackendError` as it is recorded and crosses processes. message: may quote the request."""

    kind: FailureKind
    message: str
    status: int = 0
    retry_after_ns: int = 0
    param: str = ""
    code: str = ""


class BackendError(EventLMError):
    """An attempt failed. status: the HTTP status, 0 if there was none. code: of an error in OpenAI's form.

    retry_after_ns: how long the backend wants us to wait; 0: it does not say. The message is the backend's own where
    there is one, and is shown to the client for `refused`. It holds no key.
    """

    def __init__(
        self,
        message: str,
        kind: FailureKind,
        *,
        status: int = 0,
        retry_after_ns: int = 0,
        param: str = "",
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.retry_after_ns = retry_after_ns
        self.param = param
        self.code = code

    @property
    def failure(self) -> BackendFailure:
        """The same as a struct."""
        return BackendFailure(self.kind, str(self), self.status, self.retry_after_ns, self.param, self.code)


class BackendFacts(Struct, frozen=True, kw_only=True):
    """What a backend says of itself. Numbers are 0 and texts empty where it does not say.

    models: the names that it serves. max_concurrency: how many requests it runs at once. cache_tokens: what its
    prefix cache holds. server_id: of an eventlm, which process it is.
    """

    kind: BackendKind
    version: str = ""
    models: list[str] = []
    max_model_len: int = 0
    max_concurrency: int = 0
    cache_tokens: int = 0
    server_id: str = ""


def described(spec: BackendSpec, facts: BackendFacts) -> dict[str, Any]:
    """What a header and the log say of a backend, as far as it is known."""
    found = {
        "kind": facts.kind,
        "version": facts.version,
        "model": spec.model or ", ".join(facts.models),
        "max_model_len": facts.max_model_len,
        "max_concurrency": spec.max_concurrency or facts.max_concurrency,
        "cache_tokens": facts.cache_tokens,
    }
    return {name: value for name, value in found.items() if value}


class BackendLoad(Struct, frozen=True):
    """What a backend's metrics say: requests that it runs and that wait there, and used KV cache in millionths; -1:
    it does not say.
    """

    running: int = -1
    waiting: int = -1
    kv_used_ppm: int = -1


class Attempt(Struct, frozen=True, kw_only=True):
    """One request for one choice. request_id: sent as `x-request-id`. first_seconds: longest silence before the first
    delta, silence_seconds: after it. text, token_ids, num_tokens: output that was shown already, which the answer goes
    on from; only for a backend that can. token_ids: if the prompt is token ids.
    """

    request: ForwardedRequest
    seed: int
    request_id: str
    first_seconds: float
    silence_seconds: float
    text: str = ""
    token_ids: list[int] = []
    num_tokens: int = 0


class Backend(Protocol):
    """A client of one backend. `close` it."""

    @property
    def spec(self) -> BackendSpec:
        """How to reach it."""
        ...

    @property
    def facts(self) -> BackendFacts:
        """As it said when it was asked last."""
        ...

    async def ask(self) -> BackendFacts:
        """Ask for its kind, models and limits. Raises BackendError."""
        ...

    async def read_load(self) -> BackendLoad | None:
        """Its metrics of now; None if it has none. Raises BackendError."""
        ...

    def can_continue(self, request: ForwardedRequest, *, is_counted: bool = True) -> bool:
        """Whether it can go on from tokens that another backend gave. is_counted: whether their number is exact."""
        ...

    def forward(self, attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        """The answer, of which `AnswerEnd` is the last. Closing the iterator ends the request. Raises BackendError."""
        ...

    async def close(self) -> None:
        """End its connections."""
        ...


#: All backends of a list that may change, again and again.
Watch = Callable[[], AsyncIterator[list[BackendSpec]]]
#: Makes the client of a backend.
Connect = Callable[[BackendSpec], Backend]
