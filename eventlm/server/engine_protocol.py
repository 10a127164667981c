"""What the server needs of an engine: `eventlm.engine.inference_engine.InferenceEngine` where both are in one process,
`eventlm.frontend.remote_engine.RemoteEngine` in a front end.
"""

from __future__ import annotations

from typing import Literal, Protocol

from eventlm.engine.admin import AdminAction, EngineStatus
from eventlm.engine.explanations import ExplainAnswer
from eventlm.engine.response_status import ReplyStatus
from eventlm.metrics.components import EngineMetrics
from eventlm.text.engine import TextEngine


class Engine(TextEngine, Protocol):
    """The public face of the engine, as far as an edge uses it."""

    @property
    def state(self) -> Literal["loading", "ready", "draining", "dead"]:
        """Only a ready engine takes requests."""
        ...

    @property
    def paused(self) -> bool:
        """Whether an operator has it start nothing more; requests are taken and wait."""
        ...

    async def read_metrics(self) -> EngineMetrics:
        """All figures of this moment."""
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
