"""The edge of a reply that may die before the reply is over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from eventlm.engine.request import OnOutput, Put, RequestOutput, TakenOver
from eventlm.errors import EventLMError


class LooseEdge:
    """Passes outputs on to the present edge, if there is one, who owes the engine the ends of the texts. Without one
    the reply is an orphan.

    Nothing is kept here: an edge that comes later first gets what the registry keeps. front_end: the number of the one
    that the edge is in, 0 for the engine's process.
    """

    def __init__(self, on_output: OnOutput | None = None, front_end: int = 0) -> None:
        self.on_output = on_output
        self.front_end = front_end

    def puts(self, num_requests: int) -> Sequence[Put]:
        """Where the outputs of each request go."""
        return [partial(self._put, index) for index in range(num_requests)]

    def _put(self, index: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        if self.on_output is not None:
            self.on_output(index, output)
