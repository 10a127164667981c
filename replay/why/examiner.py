"""Answers `why` and `show plan` for any position of a log.

A plan that left a sequence out holds until the replica's next one, which may be many drains later. So a core is taken
from before the latest plan that counts, and the facts from there on are applied again, with a witness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.core.core import Core
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.plan_witness import PlanEntry
from eventlm.core.state.step_plan import WaitReason
from eventlm.core.wait_reason import WaitWatch, first_plan_that_counts
from eventlm.errors import UsageError
from eventlm.events import Fact, Marker, Snapshot
from eventlm.events.codec import DECISION_TAGS
from eventlm.replay.rebuild import Rebuilt
from eventlm.replay.why.constraints import live
from eventlm.replay.why.holders import find_pool_use
from eventlm.replay.why.next_step import MAX_LINES, NextStep, find_next_step
from eventlm.replay.why.plan import PlannedTurn, find_turns
from eventlm.replay.why.why import Why, live_sequence, why
from eventlm.types import SequenceId


class PlanSeen(NamedTuple):
    """The state after a drain, and the turns of its plans."""

    state: CoreState
    turns: list[PlannedTurn]


class _Follower:
    """Applies the lines of a log to a core, and keeps what the latest plans looked at.

    reason: why `watched` is in no step after the latest drain. It is looked for only while the sequence is live.
    """

    def __init__(self, rebuilt: Rebuilt, core: Core, watched: SequenceId | None) -> None:
        self.core = core
        self.reason: WaitReason | None = None
        self.watch = WaitWatch()
        #: What the plans of the latest drain looked at; and by replica, what its latest ones did.
        self.of_drain: list[PlanEntry] = []
        self.of_replica: dict[int, list[PlanEntry]] = {}
        self._rebuilt = rebuilt
        self._watched = watched

    def follow(self, reader: LogReader, last_s: int, check: Callable[[], None]) -> None:
        """Go on to the end of the last drain whose facts are not behind event `last_s`."""
        drain: list[Fact] = []
        is_lost = False
        for line in reader.lines_from(max(self.core.next_seq, reader.header.s)):
            if line.s > last_s:
                return
            check()
            if line.tag in DECISION_TAGS:
                continue
            event = line.event()
            if isinstance(event, Fact):
                drain.append(event)
                if event.p and not is_lost:
                    self._apply(drain)
                    drain = []
            elif isinstance(event, Marker):
                is_lost = is_lost or event.s != self.core.next_seq
                if is_lost and isinstance(event, Snapshot):
                    # The log begins here, or goes on after a gap.
                    self.core = self._rebuilt.restored_core(bytes(event.state))
                    self.watch = WaitWatch()
                    self.of_replica = {}
                    drain, is_lost = [], False
                if not is_lost:
                    self.core.apply(event)

    def _apply(self, drain: list[Fact]) -> None:
        state = self.core.state
        self.of_drain = state.witness = []
        for fact in drain:
            self.core.apply(fact)
        state.witness = None
        of_drain: dict[int, list[PlanEntry]] = {}
        for entry in self.of_drain:
            of_drain.setdefault(entry.replica, []).append(entry)
        self.of_replica |= of_drain
        sequence = None if self._watched is None else live(state, self._watched)
        self.reason = None if sequence is None else self.watch.look(state, sequence)


class Examiner:
    """Answers questions on a recorded run. A position is that of any event; what counts is the last drain that has
    ended there, its plans included. So of a decision it is the drain that it belongs to.

    restore: a core of its own, which the caller does not use any more, between two drains, and before the given event;
    the nearer the faster. Where nothing earlier is kept, `rebuilt.new_core()`.
    check: called for every line that is read, and may raise to end the work.

    All raise InvariantError where the log diverges from the core, and as LogReader does.
    """

    def __init__(
        self,
        reader: LogReader,
        rebuilt: Rebuilt,
        restore: Callable[[int], Core],
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader = reader
        self._check = check
        self._rebuilt = rebuilt
        self._restore = restore

    def why(self, s: int, request: int, index: int = 0) -> Why:
        """Why a sequence is in no step at a position. Raises UsageError if it is not live there."""
        follower, begun = self._follow(s, s, SequenceId(request, index))
        self._check_live(follower.core.state, s, request, index)
        state = follower.core.state
        needed = first_plan_that_counts(state, live_sequence(state, request, index))
        if needed < begun:
            earlier, earlier_begun = self._follow(s, needed, SequenceId(request, index))
            if earlier_begun < begun:
                follower, state = earlier, earlier.core.state
        witness = [entry for entries in follower.of_replica.values() for entry in entries]
        return why(state, request, index, follower.reason, follower.watch.plans, witness)

    def plan(self, s: int) -> PlanSeen:
        """What was planned in the drain at a position."""
        follower, _ = self._follow(s, s, None)
        return PlanSeen(follower.core.state, find_turns(follower.core.state, follower.of_drain))

    def next_step(self, s: int, request: int, index: int = 0, *, max_lines: int = MAX_LINES) -> NextStep | None:
        """When a sequence is next in a step after a position, or ends, and who left its replica for that. None if the
        log ends before, or `max_lines` lines have neither.
        """
        found = find_next_step(self._reader, s, request, index, max_lines=max_lines, check=self._check)
        if found is None or not found.departures:
            return found
        follower, _ = self._follow(found.first_s - 1, found.first_s, None)
        replica = follower.core.state.replicas[found.replica]
        own = {holder.sequence: holder.num_own for holder in find_pool_use(replica).holders}
        departures = [
            structs.replace(departure, num_blocks=own[departure.sequence])
            for departure in found.departures
            if departure.sequence in own
        ]
        return structs.replace(found, departures=departures)

    def _follow(self, last_s: int, before_s: int, watched: SequenceId | None) -> tuple[_Follower, int]:
        """Up to a position from the nearest core before another; and where that core began."""
        follower = _Follower(self._rebuilt, self._restore(before_s), watched)
        begun = follower.core.next_seq
        follower.follow(self._reader, last_s, self._check)
        return follower, begun

    def _check_live(self, state: CoreState, s: int, request: int, index: int) -> None:
        """Raises UsageError that says what event `request` is, if it is no live request."""
        first_s = self._reader.header.s
        if request in state.requests or request > s or request < first_s:
            live_sequence(state, request, index)
            return
        line = next(iter(self._reader.lines_from(request)), None)
        if line is not None and line.s == request and line.tag != "arrive":
            raise UsageError(
                f"event {request} is not a request but `{line.tag}`; a request's number is that of its `arrive` event"
            )
        live_sequence(state, request, index)
