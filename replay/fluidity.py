"""The fluidity index: how smoothly a reader receives a sequence's tokens (Metron, 2024).

The first token is due after the objective for TTFT, each later one the objective for TPOT after the deadline before it,
so an early token leaves more time for the next. After a late token the next deadline counts from its arrival, so that
one stall is one miss. The index is the share of tokens in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from eventlm.events import Emitted, Event, Finished, Launched, Relayed, StepCompleted, Streamed
from eventlm.metrics.live import Identity, producing_rows


def tokens_in_time(times_ns: Iterable[int], *, start_ns: int, ttft_ns: int, tpot_ns: int) -> int:
    """How many of the tokens, given by their times in order, were in time."""
    num_met = 0
    deadline_ns = start_ns + ttft_ns
    for time_ns in times_ns:
        if time_ns <= deadline_ns:
            num_met += 1
            deadline_ns += tpot_ns
        else:
            deadline_ns = time_ns + tpot_ns
    return num_met


class _StepRange(NamedTuple):
    """Consecutive steps of a replica, by number, that each produced a token of a sequence."""

    replica: int
    first: int
    end: int


class TokenArrivals:
    """Takes the events of a run in order and gives the times of a sequence's tokens once it has ended.

    Sequences in consecutive steps share the steps' times, so only joining and leaving a batch has a cost. A row counts
    as one token: this is for runs without speculation.
    """

    def __init__(self) -> None:
        #: By replica: times of its steps, the rows of the latest, and the step from which on each of them is in all.
        self._times_ns: dict[int, list[int]] = {}
        self._rows: dict[int, list[Identity]] = {}
        self._since: dict[int, dict[Identity, int]] = {}
        self._ranges: dict[Identity, list[_StepRange]] = {}
        self._launches: dict[int, Launched] = {}
        self._completed: StepCompleted | None = None
        #: Of forwarded sequences, the times of their tokens so far.
        self._relayed: dict[Identity, list[int]] = {}
        self._streamed: list[tuple[int, int, int, int]] = []

    def see(self, event: Event) -> None:
        """Take the next event."""
        if isinstance(event, Launched):
            self._launches[event.s] = event
        elif isinstance(event, StepCompleted):
            self._completed = event
        elif isinstance(event, Streamed):
            self._streamed = event.rows
        elif isinstance(event, Relayed):
            self._relay(event)
        elif isinstance(event, Emitted) and self._completed is not None:
            launched = self._launches.pop(self._completed.c, None)
            if launched is not None:
                rows = producing_rows(launched, self._completed.produced, event.dropped)
                self._step(event.replica, rows, event.ts)

    def _relay(self, event: Relayed) -> None:
        for row, (request, index, _, total) in enumerate(self._streamed):
            if row not in event.dropped:
                times_ns = self._relayed.setdefault((request, index), [])
                times_ns += [event.ts] * (total - len(times_ns))

    def _step(self, replica: int, rows: list[Identity], now_ns: int) -> None:
        times_ns = self._times_ns.setdefault(replica, [])
        step = len(times_ns)
        times_ns.append(now_ns)
        if rows == self._rows.get(replica):
            return
        since = self._since.setdefault(replica, {})
        present = dict.fromkeys(rows)
        for identity in [identity for identity in since if identity not in present]:
            self._leave(replica, identity, step)
        for identity in present:
            since.setdefault(identity, step)
        self._rows[replica] = rows

    def _leave(self, replica: int, identity: Identity, end: int) -> None:
        first = self._since[replica].pop(identity)
        self._ranges.setdefault(identity, []).append(_StepRange(replica, first, end))

    def take(self, finished: Finished) -> list[int]:
        """Removes and returns the token times of a sequence that has just finished, without dropped tokens."""
        identity = (finished.request, finished.index)
        if (relayed := self._relayed.pop(identity, None)) is not None:
            # What a server counts only at the end came with it.
            relayed += [finished.ts] * (finished.position - len(relayed))
            return relayed[: finished.position]
        for replica, since in self._since.items():
            if identity in since:
                self._leave(replica, identity, len(self._times_ns[replica]))
                self._rows.pop(replica, None)
        ranges = self._ranges.pop(identity, [])
        times_ns = [time for replica, first, end in ranges for time in self._times_ns[replica][first:end]]
        return times_ns[: finished.position]
