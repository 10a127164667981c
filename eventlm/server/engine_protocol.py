"""What the server needs of an engine: `eventlm.engine.inference_engine.InferenceEngine` where both are in one process,
`eventlm.frontend.remote_engine.RemoteEngine` in a front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from eventlm.engine.admin import AdminAction, EngineStatus
from eventlm.engine.explanations import ExplainAnswer
from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import EngineRequest, OnOutput, RequestHandle, ResumedReply, Submission
from eventlm.engine.response_status import ReplyStatus
from eventlm.metrics.components import EngineMetrics


class Engine(Protocol):
    """The public face of the engine, as far as an edge uses it."""

    @property
    def state(self) -> Literal["loading", "ready", "draining", "dead"]:
        """Only a ready engine takes requests."""
        ...

    @property
    def paused(self) -> bool:
        """Whether an operator has it start nothing more; requests are taken and wait."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest context (prompt and output) in tokens."""
        ...

    @property
    def model_names(self) -> list[str]:
        """Names that requests may use."""
        ...

    def now_ns(self) -> int:
        """The run's clock."""
        ...

    async def read_metrics(self) -> EngineMetrics:
        """All figures of this moment."""
        ...

    async def submit(
        self,
        group: Sequence[EngineRequest],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        """Admit the group as one. With `on_output` all outputs go there, in order, and none to the handles.

        Counted against the submission's limits in the same step; `rate_limits` of the first handle says what is left.
        Raises RateLimitError, QueueFullError, ContextLengthError or EngineUnavailableError.
        """
        ...

    async def resume(
        self, reply_id: str, owner: str, on_output: OnOutput, limits: RateLimits = NO_LIMITS
    ) -> ResumedReply:
        """Read a resumable reply again: `on_output` gets its outputs from the first on, in order.

        Counts as a request against the owner's limits. The reader until now is told by a `TakenOver`. Raises
        UnknownReplyError, or RateLimitError.
        """
        ...

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader of a resumable reply (0: who submitted it) is gone; nothing if another has taken over."""
        ...

    async def status(self, reply_id: str, owner: str | None) -> ReplyStatus:
        """Where the sequences of a reply are. Also by its request's id. owner None: anybody's, also by the seq of an
        arrival. Raises UnknownReplyError, and of anybody's AmbiguousRequestError.
        """
        ...

    async def explain(self, reply_id: str, owner: str) -> ExplainAnswer:
        """Where the time of a reply went. Also by its request's id. Raises UnknownReplyError, NotExplainedError."""
        ...

    async def cancel_reply(self, reply_id: str, owner: str) -> bool:
        """End the requests of a reply and drop what is kept of it; whether any was under way. Raises UnknownReplyError
        where there is neither.
        """
        ...

    async def administer(self, action: AdminAction) -> EngineStatus:
        """Do what an operator asks. Raises UnknownPolicyError, UnknownRequestError, AmbiguousRequestError or
        EngineUnavailableError.
        """
        ...
