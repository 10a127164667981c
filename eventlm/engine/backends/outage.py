"""No backend of a model is up: how long its requests wait for one."""

from __future__ import annotations

from collections.abc import Callable

from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import State
from eventlm.types import NANOSECONDS_PER_SECOND

#: Between two looks at those that wait.
LOOK_SECONDS = 0.5


class Outages:
    """Ends requests that have waited `limit_seconds` for a backend while none of their replicaset was up, by calling
    `end` with the set and its requests. later: calls something after so many seconds, while the engine lives.
    """

    def __init__(
        self,
        *,
        is_up: Callable[[int], bool],
        later: Callable[[float, Callable[[], None]], None],
        now_ns: Callable[[], int],
        state: Callable[[], CoreState | None],
        end: Callable[[int, list[int]], None],
    ) -> None:
        self._is_up = is_up
        self._later = later
        self._now_ns = now_ns
        self._state = state
        self._end = end
        #: By set, since when none of its backends is up.
        self._since_ns: dict[int, int] = {}

    def note(self, number: int, limit_seconds: int) -> None:
        """A backend of a set has come up or gone down."""
        if not self._is_up(number) and number not in self._since_ns:
            self._since_ns[number] = self._now_ns()
            self._look(number, limit_seconds)

    def _look(self, number: int, limit_seconds: int) -> None:
        if self._is_up(number):
            del self._since_ns[number]
            return
        state = self._state()
        if state is not None:
            before_ns = self._now_ns() - limit_seconds * NANOSECONDS_PER_SECOND
            if self._since_ns[number] <= before_ns and (waiting := waiting_since(state, number, before_ns)):
                self._end(number, waiting)
        self._later(LOOK_SECONDS, lambda: self._look(number, limit_seconds))


def waiting_since(state: CoreState, number: int, before_ns: int) -> list[int]:
    """The requests of a set that came by then and of which nothing is under way. Lines of batches may wait longer."""
    return [
        seq
        for seq, request in state.requests.items()
        if request.arrival.replicaset == number
        and request.arrival.ts <= before_ns
        and not request.arrival.scheduling.offline
        and all(sequence.state in (State.WAITING, State.FINISHED) for sequence in request.sequences)
    ]
