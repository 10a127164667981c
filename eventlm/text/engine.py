"""The interface of an engine for the code around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from eventlm.engine.admin import AdminAction, EngineStatus
from eventlm.engine.explanations import ExplainResponse
from eventlm.engine.object_store.actions import Objects
from eventlm.engine.oldest_requests import OldestRequests
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import (
    IdempotencyKey,
    ModelState,
    OnOutput,
    Request,
    RequestHandle,
    ResumedReply,
    Submission,
)
from eventlm.engine.request_registry import ReplyStatus
from eventlm.metrics.components import EngineMetrics


class Engine(Protocol):
    """`InferenceEngine` in this process, or `RemoteEngine` in a front end.

    Calls raise EngineUnavailableError if the engine cannot answer.
    """

    @property
    def state(self) -> Literal["loading", "ready", "draining", "dead"]:
        """Only a ready engine takes requests."""
        ...

    @property
    def paused(self) -> bool:
        """Whether an operator has paused it: requests are taken and wait."""
        ...

    @property
    def has_worker(self) -> bool:
        """Whether any replica has a worker. Without one, requests wait for the next."""
        ...

    @property
    def num_waiting_for_room(self) -> int:
        """Replicas that wait until there is room for their workers, on Ray for instance."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context (prompt and output) in tokens."""
        ...

    @property
    def server_id(self) -> str:
        """Made up at its start. A server that is asked through a network can be told from this one by it."""
        ...

    @property
    def model_names(self) -> list[str]:
        """Names that requests may use."""
        ...

    @property
    def models(self) -> dict[str, ModelState]:
        """Each of them: its own context, and whether a worker of it is up."""
        ...

    @property
    def objects(self) -> Objects:
        """What is kept between requests."""
        ...

    def now_ns(self) -> int:
        """The run's clock."""
        ...

    async def submit(
        self,
        group: Sequence[Request],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        """Admit the group as one. With `on_output` all outputs go there, in order, and none to the handles.

        Counts against the submission's limits in the same step; the first handle's `rate_limits` is what is left.
        Raises RateLimitError, QueueFullError or ContextLengthError; KeyTakenError or KeyReusedError if a reply has the
        submission's idempotency key.
        """
        ...

    async def resume(
        self, reply_id: str, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """Read a resumable reply again: `on_output` gets its outputs from the first on, in order.

        Counts as a request against the owner's limits. The previous reader gets a `TakenOver`, unless the reply has an
        idempotency key. Raises UnknownReplyError, or RateLimitError.
        """
        ...

    async def join(
        self, key: IdempotencyKey, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """As `resume`, of the reply that has an idempotency key. Raises UnknownReplyError if none has, KeyReusedError
        if it is to another request, or RateLimitError.
        """
        ...

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader of a resumable reply (0: its submitter) is gone. No effect if another has taken over."""
        ...

    async def read_metrics(self) -> EngineMetrics:
        """All metrics of this moment."""
        ...

    async def status(self, reply_id: str, owner: str | None) -> ReplyStatus:
        """Where the sequences of a reply are, by its id or its request's. owner None: anyone's, also by the seq of an
        arrival. Raises UnknownReplyError, and without an owner AmbiguousRequestError.
        """
        ...

    async def explain(self, reply_id: str, owner: str) -> ExplainResponse:
        """Where the time of a reply went, by its id or its request's. Raises UnknownReplyError, NotExplainedError."""
        ...

    async def list_oldest(self, limit: int) -> OldestRequests:
        """The oldest requests that wait and that run, up to `limit` of each, and why those wait that are in no step."""
        ...

    async def report(self, seconds: int) -> bytes:
        """A page of HTML about the last so many seconds of the run. Raises NoReportError."""
        ...

    async def cancel_reply(self, reply_id: str, owner: str) -> bool:
        """End the requests of a reply and drop its kept outputs. Returns whether any was running. Raises
        UnknownReplyError if there is nothing to end or drop.
        """
        ...

    async def administer(self, action: AdminAction) -> EngineStatus:
        """Carry out an operator's action. Raises UnknownPolicyError, UnknownRequestError, AmbiguousRequestError,
        UnknownBackendError, or UsageError for what backends cannot do.
        """
        ...


class EngineOfModel:
    """An engine with several models, as requests for one of them see it: with that one's context."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    @property
    def max_model_len(self) -> int:
        """Longest context of the model in tokens."""
        return self._engine.models[self._model].max_model_len

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
