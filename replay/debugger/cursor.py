"""The core at any event of a run, fast where a question is near the one before.

At most `SNAPSHOT_EVENTS` events are applied again to reach an event from the index's snapshots. Two more snapshots are
kept close behind the latest position, so that going back again and again is fast; going forward, the core goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.core.core import Core
from eventlm.errors import UsageError
from eventlm.events import Fact, Marker, Snapshot
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.debugger.interrupt import Interrupt
from eventlm.replay.debugger.lines import lines_between
from eventlm.replay.index.index import Index

#: How many events the two snapshots are kept behind the position, at least; twice as many at most.
_NEAR_EVENTS = (128, 1024)
#: In the time that it takes to restore a snapshot so many events can be applied.
_EVENTS_PER_RESTORE = 1500


class NoStateError(UsageError):
    """There is no state at a position, because the events before it were not recorded."""


class _Near(NamedTuple):
    next_s: int
    state: bytes


class CoreCursor:
    """Hands out one core, at the event that is asked for. It is the cursor's own: nobody else may apply events to it.

    Raises UsageError where the run was not verified.
    """

    def __init__(self, index: Index, interrupt: Interrupt) -> None:
        if index.rebuilt is None:
            raise UsageError(f"{index.path}: {index.facts.missing}")
        self._index = index
        self._rebuilt = index.rebuilt
        self._interrupt = interrupt
        self._reader = LogReader(index.path)
        self._core: Core | None = None
        #: The event that the core took in last.
        self._applied_s = -1
        #: By their distances in _NEAR_EVENTS.
        self._near: dict[int, _Near] = {}

    def close(self) -> None:
        """Close the log."""
        self._reader.close()

    def core_at(self, s: int) -> Core:
        """The core after event `s`; for a decision, after the fact that led to it.

        Raises NoStateError, and InterruptedCommandError.
        """
        if not self._holds(s):
            self._go_near(s)
            for _ in self._advance(s, keeps_near=True):
                pass
        if self._core is None or not self._holds(s):
            raise NoStateError(
                f"there is no state at event {s}: what is before it was not recorded; go on to the next `snapshot`"
            )
        return self._core

    def follow(self, s: int, last_s: int, *, with_decisions: bool = True) -> Iterator[LogLine]:
        """The lines after event `s` up to event `last_s`, while `core` is the one at each of them. Lines that have no
        state are left out. No other method may be called meanwhile.
        """
        try:
            if s >= self._index.header.s:
                self.core_at(s)
            else:
                self._core = None
        except NoStateError:
            self._core = None
        if self._core is None:
            self._core, self._applied_s = self._rebuilt.new_core(), -1
        return self._advance(last_s, first_s=s + 1, with_decisions=with_decisions)

    @property
    def core(self) -> Core:
        """The core at the line that `follow` gave last."""
        assert self._core is not None
        return self._core

    def restored_before(self, next_s: int) -> Core:
        """A core for others, from the nearest snapshot before event `next_s`."""
        start = self._snapshot_before(next_s)
        return self._index.new_core() if start is None else self._rebuilt.restored_core(start.state)

    def _holds(self, s: int) -> bool:
        return self._core is not None and self._applied_s <= s < self._core.next_seq

    def _snapshot_before(self, next_s: int) -> _Near | None:
        near = max((each for each in self._near.values() if each.next_s <= next_s), default=None)
        kept = self._index.snapshot_before(next_s)
        if kept is None or (near is not None and near.next_s >= kept.next_s):
            return near
        return _Near(kept.next_s, kept.state())

    def _go_near(self, s: int) -> None:
        """Take the core that is nearest before event `s`."""
        core, self._core = self._core, None
        kept = self._index.snapshot_before(s + 1)
        positions = [each.next_s for each in self._near.values() if each.next_s <= s + 1]
        best = max([*positions, 0 if kept is None else kept.next_s])
        if core is not None and core.next_seq <= s and best - core.next_seq <= _EVENTS_PER_RESTORE:
            self._core = core
            return
        start = self._snapshot_before(s + 1)
        self._core = self._rebuilt.new_core() if start is None else self._rebuilt.restored_core(start.state)
        self._applied_s = -1 if start is None else start.next_s - 1

    def _advance(
        self, last_s: int, *, first_s: int | None = None, keeps_near: bool = False, with_decisions: bool = False
    ) -> Iterator[LogLine]:
        core = self._core
        assert core is not None
        wanted = self._wanted_near(core.next_seq, last_s) if keeps_near else {}
        is_lost = False
        check = self._interrupt.check
        for line in lines_between(self._reader, core.next_seq if first_s is None else first_s, last_s):
            check()
            if line.tag in DECISION_TAGS or line.s < core.next_seq:
                if with_decisions and not is_lost:
                    yield line
                continue
            event = line.event()
            assert isinstance(event, Fact | Marker)
            is_lost = is_lost or line.s != core.next_seq
            # Only a core that has taken in the whole event is one.
            self._core = None
            if is_lost and isinstance(event, Snapshot):
                # The log begins here, or goes on after a gap.
                core, is_lost = self._rebuilt.restored_core(bytes(event.state)), False
            if is_lost:
                continue
            for distance in [each for each, at_s in wanted.items() if core.next_seq >= at_s]:
                if not core.state.drain_open:
                    self._near[distance] = _Near(core.next_seq, core.snapshot())
                    del wanted[distance]
            core.apply(event)
            self._core, self._applied_s = core, event.s
            yield line

    def _wanted_near(self, next_s: int, s: int) -> dict[int, int]:
        """By distance, from which event on a snapshot is to be taken on the way from `next_s` to event `s`."""
        found = {}
        for distance in _NEAR_EVENTS:
            near = self._near.get(distance)
            is_near = near is not None and s - 2 * distance <= near.next_s <= s
            if not is_near and next_s <= s - distance:
                found[distance] = s - distance
        return found
