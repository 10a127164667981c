"""The edge of a reply whose own has died with its engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from eventlm.engine.request import OnOutput, Put, RequestOutput, TakenOver
from eventlm.errors import EventLMError


class Orphan:
    """Takes the outputs of a reply until somebody adopts it, who owes the engine the ends of its texts.

    Nothing is kept here: an adopter first gets what the registry keeps.
    """

    def __init__(self) -> None:
        self.on_output: OnOutput | None = None

    def puts(self, num_requests: int) -> Sequence[Put]:
        """Where the outputs of each request go."""
        return [partial(self._put, index) for index in range(num_requests)]

    def _put(self, index: int, output: RequestOutput | TakenOver | EventLMError) -> None:
        if self.on_output is not None:
            self.on_output(index, output)
