"""The part of a run's fold that is about other servers: the attempts to have them answer, and which are up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from eventlm.core.state.core_state import CoreState
from eventlm.events import (
    BackendDown,
    BackendUp,
    Event,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    RetrySet,
    Streamed,
    Withdrawn,
)
from eventlm.replay.index.tables import ATTEMPTS, GrowingTable, MarkKind, NameTable

Identity = tuple[int, int]


class ForwardedLives(Protocol):
    """Keeps the sequences that are forwarded."""

    def find_row(self, request: int, index: int) -> int:
        """The row of a live sequence in `requests`, else -1."""
        ...

    def note_sent(self, identity: Identity, replica: int, now_ns: int, *, goes_on: bool) -> None:
        """A sequence that waited has been sent to a server. goes_on: it has tokens already."""
        ...

    def note_answer(self, identity: Identity, replica: int, now_ns: int) -> bool:
        """A server has brought tokens of it; False if it is no sequence of tokens."""
        ...

    def note_retry(self, identity: Identity, now_ns: int) -> None:
        """It waits to be sent again."""
        ...

    def mark(
        self, event: Event, kind: MarkKind, *, replica: int = -1, request: int = -1, index: int = -1, text: str = ""
    ) -> None:
        """Note a point of the run."""
        ...


class AttemptsFold:
    """Takes the events of other servers in order."""

    def __init__(self, lives: ForwardedLives, names: NameTable) -> None:
        self.attempts = GrowingTable(ATTEMPTS)
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            BackendUp: self._up,
            BackendDown: self._down,
            Forwarded: self._forwarded,
            Streamed: self._streamed,
            Relayed: self._relayed,
            ForwardEnded: self._ended,
            ForwardFailed: self._failed,
            RetrySet: self._retry,
            Withdrawn: self._withdrawn,
        }
        self._lives = lives
        self._names = names
        #: By sequence and number: rows of those under way; and the row of the latest that has failed, or is lost.
        self._under_way: dict[Identity, dict[int, int]] = {}
        self._latest_failed: dict[Identity, int] = {}
        #: Output tokens of each sequence so far.
        self._totals: dict[Identity, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        #: By replica: the epoch of its server.
        self._epochs: dict[int, int] = {}

    def finish(self, identity: Identity, now_ns: int) -> None:
        """A sequence is over."""
        for row in self._under_way.pop(identity, {}).values():
            self._close(row, now_ns, "cut")
        self._latest_failed.pop(identity, None)
        self._totals.pop(identity, None)

    def lose(self, now_ns: int) -> None:
        """The engine died, and with it all that is under way."""
        for identity, rows in self._under_way.items():
            for row in rows.values():
                self._close(row, now_ns, "lost")
                self._latest_failed[identity] = row
        self._under_way.clear()

    def _up(self, event: BackendUp) -> None:
        if event.epoch > self._epochs.get(event.replica, -1):
            self._epochs[event.replica] = event.epoch
            self._lives.mark(event, MarkKind.BACKEND_UP, replica=event.replica, text=event.name)

    def _down(self, event: BackendDown) -> None:
        if event.epoch >= self._epochs.get(event.replica, -1):
            self._epochs[event.replica] = event.epoch
            self._lives.mark(event, MarkKind.BACKEND_DOWN, replica=event.replica, text=event.reason)

    def _forwarded(self, event: Forwarded) -> None:
        identity = (event.request, event.index)
        row = self._lives.find_row(*identity)
        if row < 0:
            return
        total = self._totals.get(identity, 0)
        self._under_way.setdefault(identity, {})[event.attempt] = self.attempts.add(
            row,
            event.attempt,
            event.replica,
            event.ts,
            *(-1,) * 3,
            0,
            -1,
            int(event.hedge),
            event.cached_tokens,
            event.running,
            event.limit,
            total,
            total,
        )
        if not event.hedge:
            self._lives.note_sent(identity, event.replica, event.ts, goes_on=total > 0)

    def _streamed(self, event: Streamed) -> None:
        self._rows = event.rows

    def _relayed(self, event: Relayed) -> None:
        rows, self._rows = self._rows, []
        dropped = set(event.dropped)
        for place, (request, index, attempt, total) in enumerate(rows):
            row = self._under_way.get((request, index), {}).get(attempt, -1)
            if place not in dropped and row >= 0:
                self._go_on((request, index), row, total, event.ts)

    def _go_on(self, identity: Identity, row: int, total: int, now_ns: int) -> None:
        columns = self.attempts.columns
        if columns["first_ns"][row] < 0:
            columns["first_ns"][row] = now_ns
        if self._lives.note_answer(identity, columns["replica"][row], now_ns):
            columns["total"][row] = self._totals[identity] = total

    def _ended(self, event: ForwardEnded) -> None:
        identity = (event.request, event.index)
        row = self._under_way.get(identity, {}).pop(event.attempt, -1)
        if row < 0:
            return
        if event.num_tokens > self._totals.get(identity, 0):
            self._go_on(identity, row, event.num_tokens, event.ts)
        self._close(row, event.ts, "answered")

    def _failed(self, event: ForwardFailed) -> None:
        identity = (event.request, event.index)
        row = self._under_way.get(identity, {}).pop(event.attempt, -1)
        if row < 0:
            return
        self._close(row, event.ts, event.kind)
        self.attempts.columns["status"][row] = event.status
        self._latest_failed[identity] = row
        replica = self.attempts.columns["replica"][row]
        self._lives.mark(
            event,
            MarkKind.FORWARD_FAILED,
            replica=replica,
            request=event.request,
            index=event.index,
            text=event.kind,
        )

    def _retry(self, event: RetrySet) -> None:
        identity = (event.request, event.index)
        row = self._latest_failed.get(identity, -1)
        if row >= 0:
            self.attempts.columns["retry_ns"][row] = event.due_ns
        self._lives.note_retry(identity, event.ts)

    def _withdrawn(self, event: Withdrawn) -> None:
        row = self._under_way.get((event.request, event.index), {}).pop(event.attempt, -1)
        if row >= 0:
            self._close(row, event.ts, "withdrawn")

    def _close(self, row: int, now_ns: int, end: str) -> None:
        self.attempts.columns["ended_ns"][row] = now_ns
        self.attempts.columns["end"][row] = self._names.position(end)

    def resume(self, state: CoreState) -> None:
        """The log begins, or goes on after a gap, with a snapshot of this state. What it does not have has ended, at a
        time that is not known.
        """
        self._rows = []
        before, self._under_way = self._under_way, {}
        self._latest_failed.clear()
        self._totals = {s.id: s.num_output_tokens for each in state.requests.values() for s in each.sequences}
        self._epochs = {replica.index: replica.epoch for replica in state.replicas}
        for replicaset in state.replicasets:
            for identity, attempts in replicaset.forwards.attempts.items() if replicaset.forwards else ():
                replica = state.requests[identity.request].sequences[identity.index].replica
                known = before.pop(identity, {})
                pairs = ((attempts.current, replica, attempts.sent_ns), (attempts.hedge, attempts.hedge_replica, -1))
                for number, on, sent_ns in pairs:
                    if number:
                        row = known.pop(number, -1)
                        if row < 0:
                            row = self._take_up(identity, number, on, sent_ns, is_hedge=number == attempts.hedge)
                        self._under_way.setdefault(identity, {})[number] = row
                before[identity] = known
        for rows in before.values():
            for row in rows.values():
                self._close(row, -1, "unknown")

    def _take_up(self, identity: Identity, number: int, replica: int, sent_ns: int, *, is_hedge: bool) -> int:
        row, total = self._lives.find_row(*identity), self._totals[identity]
        places = (row, number, replica, sent_ns, *(-1,) * 3, 0, -1, int(is_hedge), 0, 0, -1, total, total)
        return self.attempts.add(*places)
