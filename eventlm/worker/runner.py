"""What computes a worker's steps, whichever model it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.worker.protocol import StepOutput, StepPayload, StepSample


class PeerLostError(EventLMError):
    """Another rank of the replica is gone, so this one cannot go on. The end of that one says why."""


class StepUnderWay(Protocol):
    """A launch that was begun."""

    def is_done(self) -> bool:
        """Whether `finish` need not wait."""
        ...

    @property
    def due_ns(self) -> int:
        """Before this time of the machine's monotonic clock it is not done; 0: that is not known."""
        ...

    def finish(self) -> StepOutput:
        """What it gave, once it is done."""
        ...

    @property
    def times_ns(self) -> tuple[int, int]:
        """When it began and ended, on this machine's monotonic clock, once it is finished; of stages, when the first
        one began, on its own machine's.
        """
        ...


class Runner(Protocol):
    """What computes steps."""

    def start(self, launch: Launched, payload: StepPayload) -> StepUnderWay:
        """Begin to compute every row of a launch, those before it being done or under way. Raises DesyncError."""
        ...

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Done when the grammar's matcher is built; raises GrammarError if that cannot be."""
        ...

    def warm_up(self) -> list[StepSample]:
        """Measured steps of several shapes, in at most 2 s."""
        ...

    def work_ahead(self) -> bool:
        """Called while no step is there: do for a moment what would cost later steps time. False if nothing is left."""
        ...

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Fingerprint of the model, and the host as the header of a trace describes it."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that it has."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the log should have of its start."""
        ...

    @property
    def waits_for_peers(self) -> bool:
        """Whether a step waits for another rank of the replica. Read in any thread, also in the middle of a step."""
        ...


class ExecutedStep:
    """A launch that a runner computes at once."""

    due_ns = 0

    def __init__(self, execute: Callable[[], StepOutput]) -> None:
        start_ns = time.monotonic_ns()
        self._output = execute()
        self.times_ns = (start_ns, time.monotonic_ns())

    def is_done(self) -> bool:
        """It is."""
        return True

    def finish(self) -> StepOutput:
        """What it gave."""
        return self._output


class AwaitedStep:
    """A launch that a runner computes once another rank has given what it begins with.

    has_input: whether that is there, or why there will be none; may wait a moment for it.
    """

    due_ns = 0

    def __init__(self, has_input: Callable[[], bool], execute: Callable[[], StepOutput]) -> None:
        self._has_input = has_input
        self._execute = execute
        self.times_ns = (0, 0)

    def is_done(self) -> bool:
        """Whether nothing but its own work is left."""
        return self._has_input()

    def finish(self) -> StepOutput:
        """What it gave, once it has what it waits for."""
        start_ns = time.monotonic_ns()
        output = self._execute()
        first, *_, last = output.stages or [(start_ns, time.monotonic_ns())] * 2
        self.times_ns = (first[0], last[1])
        return output


def has_rows(launch: Launched) -> bool:
    """Whether a launch computes anything."""
    return bool(launch.decodes or launch.chunks)
