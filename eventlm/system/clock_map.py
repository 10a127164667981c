"""Times of another host's clock on this host's: from messages that go there and back."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

#: Of so many round trips the fastest counts. Clocks drift, so none counts for ever.
NUM_SAMPLES = 64


class _RoundTrip(NamedTuple):
    """The fastest is the least. offset_ns: what to add to a time there."""

    duration_ns: int
    offset_ns: int


class ClockMap:
    """Maps the monotonic clock of one other host. It takes the other side to have answered in the middle of a round
    trip, so it is wrong by half of the fastest one at most.
    """

    def __init__(self) -> None:
        self._trips: deque[_RoundTrip] = deque(maxlen=NUM_SAMPLES)
        self._offset_ns = 0

    @property
    def is_known(self) -> bool:
        """Whether there was a round trip."""
        return bool(self._trips)

    def note(self, *, sent_ns: int, there_ns: int, received_ns: int) -> None:
        """A message was sent here, answered there and the answer received here, each at these times."""
        middle_ns = (sent_ns + received_ns) // 2
        self._trips.append(_RoundTrip(received_ns - sent_ns, middle_ns - there_ns))
        self._offset_ns = min(self._trips).offset_ns

    def to_here(self, there_ns: int) -> int:
        """A time there, on this host's clock."""
        return there_ns + self._offset_ns
