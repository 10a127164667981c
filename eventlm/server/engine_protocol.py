"""What the server needs of an engine; `eventlm.control.engine.InferenceEngine` is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from eventlm.control.metrics_components import EngineMetrics
from eventlm.control.request import EngineRequest, RequestHandle


class Engine(Protocol):
    """The public face of the engine, as far as an edge uses it."""

    @property
    def state(self) -> Literal["loading", "ready", "draining", "dead"]:
        """Only a ready engine takes requests."""
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

    def metrics(self) -> EngineMetrics:
        """All figures of this moment."""
        ...

    async def submit(self, group: Sequence[EngineRequest]) -> list[RequestHandle]:
        """Admit the group as one. Raises QueueFullError, ContextLengthError or EngineUnavailableError."""
        ...
