"""The fluidity index: how smoothly a sequence's tokens came, as its reader sees it (Metron, 2024).

Each token has a deadline: the first one the objective for TTFT, each later one the objective for TPOT behind the
deadline before it; so a token that comes early lets a later one take its time. Behind a token that was late the next
deadline counts from its coming, for one stall is one miss and not one for every token behind it. The index is the share
of tokens that met theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from eventlm.events import Emitted, Event, Finished, Launched, StepCompleted
from eventlm.metrics.live import Identity, producing_rows


def tokens_in_time(times_ns: Iterable[int], *, start_ns: int, ttft_ns: int, tpot_ns: int) -> int:
    """How many of the tokens, given by their times in order, met their deadlines."""
    num_met = 0
    deadline_ns = start_ns + ttft_ns
    for time_ns in times_ns:
        if time_ns <= deadline_ns:
            num_met += 1
            deadline_ns += tpot_ns
        else:
            deadline_ns = time_ns + tpot_ns
    return num_met


class _Stretch(NamedTuple):
    """Steps of a replica, by number, in each of which a sequence had a token."""

    replica: int
    first: int
    end: int


class ReadingTimes:
    """Takes the events of a run in order, and tells when each token of a sequence came, once it has ended.

    Sequences that are in one step after the other share the steps' times; only joining and leaving costs something.
    A row counts for one token: it is for runs without speculation.
    """

    def __init__(self) -> None:
        #: By replica: times of its steps, the rows of the latest, and since which step each of these is in all.
        self._times_ns: dict[int, list[int]] = {}
        self._rows: dict[int, list[Identity]] = {}
        self._since: dict[int, dict[Identity, int]] = {}
        self._stretches: dict[Identity, list[_Stretch]] = {}
        self._launches: dict[int, Launched] = {}
        self._completed: StepCompleted | None = None

    def see(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, Launched):
            self._launches[event.s] = event
        elif isinstance(event, StepCompleted):
            self._completed = event
        elif isinstance(event, Emitted) and self._completed is not None:
            launched = self._launches.pop(self._completed.c, None)
            if launched is not None:
                rows = producing_rows(launched, self._completed.produced, event.dropped)
                self._step(event.replica, rows, event.ts)

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
        self._stretches.setdefault(identity, []).append(_Stretch(replica, first, end))

    def take(self, finished: Finished) -> list[int]:
        """Times of the tokens of a sequence that has just finished, as many as belong to it. Forgets them."""
        identity = (finished.request, finished.index)
        for replica, since in self._since.items():
            if identity in since:
                self._leave(replica, identity, len(self._times_ns[replica]))
                self._rows.pop(replica, None)
        stretches = self._stretches.pop(identity, [])
        times_ns = [time for replica, first, end in stretches for time in self._times_ns[replica][first:end]]
        return times_ns[: finished.position]
