"""What the text wing needs of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eventlm.engine.rate_limits import NO_LIMITS, RateLimits
from eventlm.engine.request import OnOutput, Request, RequestHandle, ResumedReply, Submission


class TextEngine(Protocol):
    """Takes requests of token ids and returns their outputs."""

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

    async def submit(
        self,
        group: Sequence[Request],
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

        Counts as a request against the owner's limits. The previous reader gets a `TakenOver`. Raises
        UnknownReplyError, or RateLimitError.
        """
        ...

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader of a resumable reply (0: its submitter) is gone; nothing if another has taken over."""
        ...
