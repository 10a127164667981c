"""The loop around the core: pending facts are stamped and applied as one tick, and what the core decides is done.

Live engines, simulations, repetitions of recorded runs and tests share it. They differ in the clock and in what they do
with events. Nothing else stamps a fact or a marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec import structs

from eventlm.core.core import Core
from eventlm.events import Checkpoint, Decision, Desynced, Fact, Marker, Recovered, TimerDue, WorkerLost, WorkerUp

#: Makes facts just before they are stamped, so that they can depend on what earlier facts of the tick did. Gets the
#: position of the first of them and the time of the tick, and makes at least one.
MakeFacts = Callable[[int, int], Sequence[Fact]]

_OF_WORKERS = (WorkerUp, WorkerLost, Desynced)


class RunClock(Protocol):
    """A clock of the run's own time, in nanoseconds. `call_at` may be early; what it returns cancels the call."""

    def now_ns(self) -> int: ...

    def call_at(self, due_ns: int, action: Callable[[], None]) -> Callable[[], None]: ...


class Shell(NamedTuple):
    """What surrounds the core, in the order of the log.

    fact: called before a fact is applied. worker_changed: called after a fact about a replica's worker, with its
    decisions; after `recovered` for each replica, without. decision: carries out a decision. marker: takes a stamped
    marker. drained: called at the end of a tick, where markers may follow.
    """

    fact: Callable[[Fact], None]
    worker_changed: Callable[[int, Sequence[Decision]], None]
    decision: Callable[[Decision], None]
    marker: Callable[[Marker], None]
    drained: Callable[[], None]


class CoreLoop:
    """Drives a core.

    checkpoint_events: events between two digests of the state in the log; 0 for none. fires_timers: whether this loop
    fires the core's timers; otherwise the caller queues their facts.
    """

    def __init__(
        self, core: Core, clock: RunClock, shell: Shell, *, checkpoint_events: int = 0, fires_timers: bool = True
    ) -> None:
        self.core = core
        self._clock = clock
        self._shell = shell
        self._checkpoint_events = checkpoint_events
        self._last_checkpoint = core.next_seq
        self._fires_timers = fires_timers
        self._armed_ns: int | None = None
        self._cancel_timer: Callable[[], None] | None = None
        self._pending: list[MakeFacts] = []
        # A core from a snapshot may have timers.
        self._arm_timer()

    @property
    def has_pending(self) -> bool:
        """Whether anything is pending."""
        return bool(self._pending)

    def put(self, make: MakeFacts) -> None:
        """Queue facts for the next drain."""
        self._pending.append(make)

    def put_fact(self, fact: Fact) -> None:
        """Queue one fact that depends on nothing."""
        self._pending.append(lambda seq, ts: [fact])

    def drain(self, now_ns: int) -> None:
        """Apply all that is pending as one tick at `now_ns`, or 1 ns after the last one if the clock stood still."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        core = self.core
        ts = max(now_ns, core.state.now_ns + 1)
        last = pending.pop()
        for make in pending:
            for fact in make(core.next_seq, ts):
                self._apply(fact, ts, 0)
        *others, marked = last(core.next_seq, ts)
        for fact in others:
            self._apply(fact, ts, 0)
        self._apply(marked, ts, 1)
        self._shell.drained()
        if self._checkpoint_events and core.next_seq - self._last_checkpoint >= self._checkpoint_events:
            self.checkpoint()
        self._arm_timer()

    def mark(self, marker: Marker) -> None:
        """Stamp a marker and pass it on. Its cause is the event before it, unless it names one."""
        self._shell.marker(self.stamp(marker))

    def stamp(self, marker: Marker) -> Marker:
        """Stamp a marker without passing it to the shell."""
        seq = self.core.next_seq
        stamped = structs.replace(marker, s=seq, ts=self.core.state.now_ns, c=marker.c or max(seq - 1, 0))
        self.core.apply(stamped)
        return stamped

    def checkpoint(self) -> None:
        """Mark the log with a digest of the state."""
        self.mark(Checkpoint(digests=self.core.digests()))
        self._last_checkpoint = self.core.next_seq

    def disarm(self) -> None:
        """Let no timer fire until the next drain."""
        self._armed_ns = None
        if self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None

    def _apply(self, fact: Fact, ts: int, p: int) -> None:
        shell = self._shell
        stamped = structs.replace(fact, s=self.core.next_seq, ts=ts, p=p)
        shell.fact(stamped)
        decisions = self.core.apply(stamped)
        self.tell_of_workers(stamped, decisions)
        for decision in decisions:
            shell.decision(decision)

    def tell_of_workers(self, fact: Fact, decisions: Sequence[Decision]) -> None:
        """Tell the shell whose workers a fact has changed."""
        if isinstance(fact, _OF_WORKERS):
            self._shell.worker_changed(fact.replica, decisions)
        elif isinstance(fact, Recovered):
            for replica in self.core.state.replicas:
                self._shell.worker_changed(replica.index, [])

    def _arm_timer(self) -> None:
        """One timer at a time, the core's earliest."""
        due_ns = self.core.next_timer_ns
        if self._fires_timers and due_ns != self._armed_ns:
            self.disarm()
            if due_ns is not None:
                self._armed_ns = due_ns
                self._cancel_timer = self._clock.call_at(due_ns, lambda: self._fire(due_ns))

    def _fire(self, due_ns: int) -> None:
        if due_ns != self._armed_ns:
            return
        self._armed_ns = self._cancel_timer = None
        now_ns = self._clock.now_ns()
        if now_ns < due_ns:
            self._arm_timer()
        else:
            self.put_fact(TimerDue(due_ns=now_ns))
