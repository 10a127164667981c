"""Searches a small world completely, breadth first, and reports any violation by the shortest path to it.

1. **Safety.** Every state satisfies `validate`, and after a marked fact `validate_liveness`; no fact makes the core
   raise.
2. **Liveness.** From every state, all requests can still end. This is checked once all states are known, by searching
   backwards from those in which all requests that have come have ended, along owed moves only: steps complete, workers
   come back, texts are checked. So no cancel, no loss and no further request is needed; and whichever owed moves come
   first, they do not go on for ever. Requests that have not come yet can come where the others have ended, and from
   there all can end again.
3. **Snapshots are complete**: a core that is restored from one makes the same decisions. Some states are checked.
4. **The digest is right**: for some states that were found again, the second copy leads to the same states.

For each state, the search keeps its digest, the state from which it was first reached, and the number of the move.
Complete states are kept only until they are expanded.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import json

from eventlm.core.core import Core
from eventlm.core.state.validate import validate, validate_liveness
from eventlm.events import Decision, Finished, Preempted, Rejected
from tests.world.scopes.canonical import digest
from tests.world.scopes.copies import copy, pack, unpack
from tests.world.scopes.world import Move, Scope, World

#: One in this many states that are found again is expanded as well.
_TWINS_EVERY = 997
_REPORT_EVERY = 20_000
#: One in this many states is restored from its snapshot.
_RESTORED_EVERY = 499
#: How many worlds wait unpacked, at 12 KB each. Packing and unpacking a world takes as long as expanding it.
_MOST_UNPACKED = 100_000
#: Marks that there is no such state.
_NONE = 0xFFFFFFFF


class Violation(AssertionError):
    """A state that must not occur. path: the numbers of the moves that lead to it."""

    def __init__(self, scope: Scope, path: list[int], problem: str) -> None:
        self.path = path
        moves = ",".join(map(str, path))
        facts = "\n".join(f"  {number:2}  {fact}" for number, fact in zip(path, facts_of(scope, path), strict=True))
        super().__init__(
            f"scope {scope.name}, {len(path)} facts: {problem}\n{facts}\n"
            f"To reproduce: python -m tests.world.scopes {scope.name} --path {moves}"
        )


@dataclass
class Result:
    """The result of a search. seconds: CPU time on one core."""

    num_states: int = 0
    num_transitions: int = 0
    depth: int = 0
    num_twins: int = 0
    num_restored: int = 0
    seconds: float = 0.0
    #: Whether every state was expanded.
    is_whole: bool = True
    #: How often each kind of decision was made.
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, other: Result) -> None:
        """Add the numbers of another search."""
        self.num_states += other.num_states
        self.num_transitions += other.num_transitions
        self.num_twins += other.num_twins
        self.num_restored += other.num_restored
        self.depth = max(self.depth, other.depth)
        self.seconds += other.seconds
        self.is_whole &= other.is_whole
        self.seen.update(other.seen)

    def __str__(self) -> str:
        return (
            f"{self.num_states:,} states, {self.num_transitions:,} transitions, depth {self.depth}, "
            f"{self.seconds:.1f} s, {self.num_states / max(self.seconds, 0.001):,.0f} states/s, "
            f"{self.num_twins:,} twins and {self.num_restored:,} snapshots compared"
            + ("" if self.is_whole else ", NOT WHOLE")
        )


class _Frontier(NamedTuple):
    """A state that still has to be expanded."""

    state: int
    world: World | bytes
    depth: int


class Search:
    """A search. most_states: stop there; the search is then not complete, and does not check liveness."""

    def __init__(self, scope: Scope, *, most_states: int = 0, report: Callable[[Result], None] | None = None) -> None:
        self.scope = scope
        self.result = Result()
        self._most = most_states
        self._report = report
        self._known: dict[int, int] = {}
        #: For each state: the state from which it was first reached, and the number of the move.
        self._parent = array("I")
        self._move = array("H")
        #: For each state: whether all requests that have come have ended.
        self._done = array("B")
        #: The transitions by owed moves.
        self._from = array("I")
        self._to = array("I")
        self._frontier: deque[_Frontier] = deque()

    def run(self) -> Result:
        """Search the scope. Raises Violation for the first one that is found."""
        # Worlds have no reference cycles, and there are many of them.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        finally:
            if was_enabled:
                gc.enable()

    def _run(self) -> Result:
        began = time.process_time()
        world = self.scope.begin()
        self._known[digest(world)] = 0
        self._parent.append(_NONE)
        self._move.append(0)
        self._done.append(world.is_done)
        self._frontier.append(_Frontier(0, world, 0))
        while self._frontier:
            if self._most and len(self._known) >= self._most:
                self.result.is_whole = False
                break
            item = self._frontier.popleft()
            self.result.depth = item.depth
            self._expand(item)
            if self._report is not None and self.result.num_states // _REPORT_EVERY < len(self._known) // _REPORT_EVERY:
                self._sum_up(began)
                self._report(self.result)
        self._sum_up(began)
        if self.result.is_whole:
            self._check_liveness()
        self._sum_up(began)
        return self.result

    def _sum_up(self, began: float) -> None:
        self.result.num_states = len(self._known)
        self.result.seconds = time.process_time() - began

    def _expand(self, item: _Frontier) -> None:
        world = unpack(item.world) if isinstance(item.world, bytes) else item.world
        moves = world.moves()
        for number, move in enumerate(moves):
            # The last move may use the original.
            after = world if number + 1 == len(moves) else copy(world)
            try:
                known = self._take(item, number, move, after)
            except Violation:
                raise
            except Exception as error:
                raise self._violation(item.state, number, f"{type(error).__name__}: {error}") from error
            if move.is_owed:
                self._from.append(item.state)
                self._to.append(known)

    def _take(self, item: _Frontier, number: int, move: Move, world: World) -> int:
        """Make a move in a copy of a state. Returns the number of the state that it leads to."""
        for decision in world.apply(move):
            self.result.seen[_kind_of(decision)] += 1
        self.result.num_transitions += 1
        found = digest(world)
        known = self._known.get(found)
        if known is None:
            return self._add(item, number, world, found)
        if self.result.num_transitions % _TWINS_EVERY == 0:
            self._compare(known, world, [*self._path(item.state), number])
        return known

    def _add(self, item: _Frontier, number: int, world: World, found: int) -> int:
        state = world.core.state
        validate(state)
        if not state.drain_open:
            validate_liveness(state)
            if len(self._parent) % _RESTORED_EVERY == 0:
                self._check_restored(item.state, number, world)
        known = self._known[found] = len(self._parent)
        self._parent.append(item.state)
        self._move.append(number)
        self._done.append(world.is_done)
        kept = world if len(self._frontier) < _MOST_UNPACKED else pack(world)
        self._frontier.append(_Frontier(known, kept, item.depth + 1))
        return known

    def _compare(self, state: int, world: World, path: list[int]) -> None:
        """Check that a world with the digest of a known state goes on as that state does."""
        self.result.num_twins += 1
        theirs, ours = _next_digests(replay(self.scope, self._path(state))), _next_digests(world)
        if ours != theirs:
            known = ",".join(map(str, self._path(state)))
            raise Violation(self.scope, path, f"it goes on otherwise than its twin, to which the moves {known} lead")

    def _check_restored(self, state: int, number: int, world: World) -> None:
        """Check that a core that is restored from a snapshot goes on as the original does."""
        self.result.num_restored += 1
        restored = copy(world)
        first, *others = world.parts
        restored.core = Core.restored(first.config, first.plugins, world.core.snapshot(), others)
        for position in range(len(world.moves())):
            ours, theirs = copy(world), copy(restored)
            decisions = ours.apply(ours.moves()[position]), theirs.apply(theirs.moves()[position])
            if decisions[0] != decisions[1] or ours.core.digests() != theirs.core.digests():
                raise self._violation(
                    state, number, f"restored from a snapshot, it goes on otherwise by move {position}"
                )

    def _violation(self, state: int, number: int, problem: str) -> Violation:
        return Violation(self.scope, [*self._path(state), number], problem)

    def _path(self, state: int) -> list[int]:
        """The numbers of the moves that lead to a state."""
        path = []
        while self._parent[state] != _NONE:
            path.append(self._move[state])
            state = self._parent[state]
        return path[::-1]

    def _check_liveness(self) -> None:
        """Check that owed moves bring every state to rest. At rest are states without requests, and states whose owed
        moves all lead to rest.
        """
        source, target = np.frombuffer(self._from, dtype=np.uint32), np.frombuffer(self._to, dtype=np.uint32)
        rests = np.frombuffer(self._done, dtype=np.uint8).astype(bool)
        num_states = len(rests)
        num_moves = np.bincount(source, minlength=num_states)
        while True:
            num_resting = np.bincount(source[rests[target]], minlength=num_states)
            further = ~rests & (num_moves > 0) & (num_resting == num_moves)
            if not further.any():
                break
            rests |= further
        if rests.all():
            return
        can = np.frombuffer(self._done, dtype=np.uint8).astype(bool)
        num_before = -1
        while num_before != (num_before := int(can.sum())):
            can[source[can[target]]] = True
        # First look for states that no owed move leaves, where the problem is plainest.
        leads_on = np.bincount(source[source != target], minlength=num_states) > 0
        candidates = [~can & ~leads_on, ~can, ~rests]
        first = int(next(np.flatnonzero(each)[0] for each in candidates if each.any()))
        what = "what is owed may go on for ever" if can[first] else "some request can end no more"
        world = replay(self.scope, self._path(first))
        waiting = [str(s) for each in world.core.state.requests.values() for s in each.sequences]
        raise Violation(self.scope, self._path(first), f"{what}: {', '.join(waiting)}")


def _next_digests(world: World) -> list[int]:
    found = []
    for move in world.moves():
        after = copy(world)
        after.apply(move)
        found.append(digest(after))
    return found


def _kind_of(decision: Decision) -> str:
    """The kind of a decision, such as `Finished length`."""
    kind = type(decision).__name__
    return f"{kind} {decision.reason}" if isinstance(decision, Preempted | Finished | Rejected) else kind


def replay(scope: Scope, path: list[int], note: Callable[[Move, list[Decision]], None] | None = None) -> World:
    """The world after a path, given as numbers of moves. note: called after each move.

    Raises InvariantError for a state that must not occur, and IndexError for a move that does not exist.
    """
    world = scope.begin()
    for number in path:
        move = world.moves()[number]
        decisions = world.apply(move)
        if note is not None:
            note(move, decisions)
        validate(world.core.state)
        if move.is_marked:
            validate_liveness(world.core.state)
    return world


def facts_of(scope: Scope, path: list[int]) -> list[str]:
    """The facts of a path as JSON. The core may refuse the last one."""
    facts: list[str] = []
    world = scope.begin()
    for position, number in enumerate(path):
        move = world.moves()[number]
        facts.append(json.encode(move.fact).decode() + ("" if move.is_marked else "  (goes on in one drain)"))
        if position + 1 < len(path):
            world.apply(move)
    return facts
