"""The part of a PhaseFold that is about sequences which are forwarded to other servers: their phases and attempts.

    queue -> prefill -> decode
               |  ^       |  ^
               v  |       v  |
               retry      retry

Such a sequence is in `prefill` until its first tokens come, whichever attempt brings them, and in `retry` between two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from eventlm.core.state.snapshot import StateSnapshot
from eventlm.events import (
    Event,
    Finished,
    Forwarded,
    ForwardEnded,
    ForwardFailed,
    Relayed,
    RetrySet,
    Streamed,
    Withdrawn,
)

Identity = tuple[int, int]
#: Ends of attempts that did not fail.
NO_FAILURES = ("answered", "withdrawn", "cut")
ForwardedPhase = Literal["prefill", "decode", "retry"]


class TracedAttempt(Struct, kw_only=True, eq=False):
    """An attempt to have a replica that is another server answer a sequence. Times in ns of the run.

    sent_ns: of one that was under way where the log begins, the begin of the log. first_ns: -1: it brought no tokens.
    end: `answered`, a kind of failure, `withdrawn`, or `cut`. running, limit: what the server had with it, and might
    have. before, total: output tokens of the sequence before it, and with what it brought.
    """

    request: int
    index: int
    number: int
    replica: int
    sent_ns: int
    is_hedge: bool = False
    cached_tokens: int = 0
    running: int = 0
    limit: int = 0
    before: int = 0
    total: int = 0
    first_ns: int = -1
    ended_ns: int = -1
    end: str = "cut"
    status: int = 0
    retry_after_ns: int = 0

    @property
    def name(self) -> str:
        """Of its sequence and its number among those of that."""
        return f"request {self.request}{f'.{self.index}' if self.index else ''}, attempt {self.number}"


class ForwardedPhases:
    """move: a sequence is in a phase from a time on, at a replica; -1: at none. ended: gets each attempt at its end."""

    def __init__(
        self, move: Callable[[Identity, ForwardedPhase, int, int], None], ended: Callable[[TracedAttempt], None]
    ) -> None:
        self.handlers: Mapping[type[Event], Callable[[Any], None]] = {
            Forwarded: self._forwarded,
            Streamed: self._streamed,
            Relayed: self._relayed,
            ForwardEnded: self._ended,
            ForwardFailed: self._failed,
            RetrySet: self._retry,
            Withdrawn: self._withdrawn,
        }
        self._move = move
        self._on_ended = ended
        self._under_way: dict[Identity, dict[int, TracedAttempt]] = {}
        #: Output tokens of live sequences.
        self._totals: dict[Identity, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []

    def take_up(self, taken: StateSnapshot) -> None:
        """The log begins, or goes on after a gap, with a snapshot."""
        self.forget()
        replicas = {}
        for request in taken.requests:
            for row in request.sequences:
                identity = (request.arrival.s, row.index)
                replicas[identity] = row.replica
                self._totals[identity] = row.num_tokens - request.arrival.prompt_tokens
        for forwards in (taken.forwards, *(other.forwards for other in taken.others or ())):
            for request_seq, index, attempts in forwards.attempts if forwards else ():
                identity = (request_seq, index)
                pairs = ((attempts.current, replicas[identity]), (attempts.hedge, attempts.hedge_replica))
                for number, replica in pairs:
                    if number:
                        self._begin(
                            TracedAttempt(
                                request=request_seq,
                                index=index,
                                number=number,
                                replica=replica,
                                sent_ns=taken.now_ns,
                                is_hedge=number == attempts.hedge,
                                before=self._totals[identity],
                                total=self._totals[identity],
                            )
                        )

    def forget(self) -> None:
        """What is under way may have ended: events are missing."""
        self._under_way.clear()
        self._totals.clear()
        self._rows = []

    def lose(self, now_ns: int) -> None:
        """The engine died, and with it all that is under way."""
        self._close_all(now_ns, "lost")

    def end(self, now_ns: int) -> None:
        """After the last event."""
        self._close_all(now_ns, "cut")
        self.forget()

    def _close_all(self, now_ns: int, end: str) -> None:
        for attempts in self._under_way.values():
            for attempt in attempts.values():
                self._close(attempt, now_ns, end)
        self._under_way.clear()

    def finish(self, event: Finished) -> None:
        """A sequence is over."""
        identity = (event.request, event.index)
        for attempt in self._under_way.pop(identity, {}).values():
            self._close(attempt, event.ts, "cut")
        self._totals.pop(identity, None)

    def _begin(self, attempt: TracedAttempt) -> None:
        self._under_way.setdefault((attempt.request, attempt.index), {})[attempt.number] = attempt

    def _forwarded(self, event: Forwarded) -> None:
        identity = (event.request, event.index)
        total = self._totals.get(identity, 0)
        self._begin(
            TracedAttempt(
                request=event.request,
                index=event.index,
                number=event.attempt,
                replica=event.replica,
                sent_ns=event.ts,
                is_hedge=event.hedge,
                cached_tokens=event.cached_tokens,
                running=event.running,
                limit=event.limit,
                before=total,
                total=total,
            )
        )
        if not event.hedge:
            self._move(identity, "decode" if total else "prefill", event.replica, event.ts)

    def _streamed(self, event: Streamed) -> None:
        self._rows = event.rows

    def _relayed(self, event: Relayed) -> None:
        rows, self._rows = self._rows, []
        dropped = set(event.dropped)
        for place, (request, index, number, total) in enumerate(rows):
            attempt = self._under_way.get((request, index), {}).get(number)
            if place not in dropped and attempt is not None:
                self._go_on(attempt, total, event.ts)

    def _go_on(self, attempt: TracedAttempt, total: int, now_ns: int) -> None:
        identity = (attempt.request, attempt.index)
        if attempt.first_ns < 0:
            attempt.first_ns = now_ns
        attempt.total = self._totals[identity] = total
        self._move(identity, "decode", attempt.replica, now_ns)

    def _take(self, event: ForwardEnded | ForwardFailed | Withdrawn) -> TracedAttempt | None:
        """One that is over; None if it was before."""
        return self._under_way.get((event.request, event.index), {}).pop(event.attempt, None)

    def _ended(self, event: ForwardEnded) -> None:
        attempt = self._take(event)
        if attempt is not None:
            if event.num_tokens > self._totals.get((event.request, event.index), 0):
                self._go_on(attempt, event.num_tokens, event.ts)
            self._close(attempt, event.ts, "answered")

    def _failed(self, event: ForwardFailed) -> None:
        attempt = self._take(event)
        if attempt is not None:
            attempt.status, attempt.retry_after_ns = event.status, event.retry_after_ns
            self._close(attempt, event.ts, event.kind)

    def _retry(self, event: RetrySet) -> None:
        self._move((event.request, event.index), "retry", -1, event.ts)

    def _withdrawn(self, event: Withdrawn) -> None:
        attempt = self._take(event)
        if attempt is not None:
            self._close(attempt, event.ts, "withdrawn")

    def _close(self, attempt: TracedAttempt, now_ns: int, end: str) -> None:
        attempt.ended_ns, attempt.end = now_ns, end
        self._on_ended(attempt)
